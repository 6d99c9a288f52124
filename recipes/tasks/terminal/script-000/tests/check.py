import json
from pathlib import Path

APP = Path("/app")
EXPECTED = json.loads(Path("/tests/expected.json").read_text())

import subprocess
def run(*words, text=''):
    done = subprocess.run([str(APP / 'tool.sh'), *words], input=text, capture_output=True, text=True, timeout=10)
    return done.returncode, done.stdout
for text, lines in EXPECTED:
    found = run(text=text)
    assert found == (0, ''.join(line + '\n' for line in lines)), found
assert run('x', text='a') == (2, '')
