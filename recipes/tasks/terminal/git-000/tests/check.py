import json
from pathlib import Path

APP = Path("/app")
EXPECTED = json.loads(Path("/tests/expected.json").read_text())

assert (APP / 'commit.txt').read_text().strip() == EXPECTED
