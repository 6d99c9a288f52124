import json
from pathlib import Path

APP = Path("/app")
EXPECTED = json.loads(Path("/tests/expected.json").read_text())

assert (APP / 'counts.txt').read_text().split('\n')[:-1] == EXPECTED
