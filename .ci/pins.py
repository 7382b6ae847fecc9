"""Print what pip would install, exactly, from the report of ``pip install --dry-run --report``."""

import json
import sys
from pathlib import Path

report = json.loads(Path(sys.argv[1]).read_text())
for item in report["install"]:
    # The checkout itself is on no index.
    if "dir_info" not in item["download_info"]:
        print(f"{item['metadata']['name']}=={item['metadata']['version']}")
