"""Reports to look at: the data of a page, and the DOM that a browser makes of it."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest


def read_page(dirpath: Path) -> dict[str, Any]:
    """The data of `report.html`, found as a browser does: from its tag to the next `</script`."""
    text = (dirpath / "report.html").read_text()
    found = re.findall(r'<script type="application/json" id="data">(.*?)</script', text, re.DOTALL)
    assert len(found) == 1
    return json.loads(found[0])


def dom_of(page: Path, profile: Path) -> str:
    """The elements that Chromium makes of a page, scripts run; skips the test where there is no Chromium."""
    browser = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    if browser is None:
        pytest.skip("no Chromium on this machine: the page is not drawn")
    flags = ["headless", "no-sandbox", "disable-gpu", "disable-quic", "no-first-run", "disable-background-networking"]
    flags += ["disable-component-update", "disable-sync", f"user-data-dir={profile}", "virtual-time-budget=3000"]
    command = [browser, *(f"--{flag}" for flag in flags), "--window-size=1280,4000", "--dump-dom", page.as_uri()]
    done = subprocess.run(command, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr
    return done.stdout
