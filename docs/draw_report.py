"""Draw docs/report.png, the report of a run of the quickstart: `./bazelw run //docs:draw_report`, some two minutes.

Trains the quickstart with seed 0 in a temporary folder and has Chromium draw the top of the page that it leaves.
`-- FOLDER` draws the report of a run that is there instead.
"""

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from apps.grpo.main import main as grpo
from runlog import write_report

SIZE = (1280, 1750)  # pixels


def photograph(page: Path, picture: Path) -> None:
    """Write a PNG of the top of an HTML page, `SIZE` large.

    Raises:
        SystemExit: there is no Chromium, or it drew nothing.
    """
    chromium = shutil.which("chromium") or shutil.which("google-chrome")
    if chromium is None:
        sys.exit("a picture of the report needs Chromium (Debian: apt-get install chromium)")
    picture.unlink(missing_ok=True)
    # Chromium puts a socket into its folder, and a socket's path has at most 107 characters.
    with tempfile.TemporaryDirectory(prefix="draw", dir="/tmp", ignore_cleanup_errors=True) as folder:
        command = [chromium, "--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"]
        command += ["--hide-scrollbars", "--force-prefers-reduced-motion", "--force-device-scale-factor=1"]
        command += [f"--user-data-dir={folder}/profile", "--window-size={},{}".format(*SIZE)]
        command += ["--virtual-time-budget=5000", f"--screenshot={picture}", page.resolve().as_uri()]
        env = {**os.environ, "HOME": folder, "TMPDIR": folder}
        done = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
    if done.returncode or not picture.exists():
        sys.exit(f"{chromium} drew nothing: {done.stderr[-2000:]}")


def main() -> None:
    """Write docs/report.png."""
    root = Path(os.environ.get("BUILD_WORKSPACE_DIRECTORY", "."))
    picture = (root / "docs" / "report.png").absolute()
    with tempfile.TemporaryDirectory(prefix="tessera") as folder:
        run = Path(folder, "quickstart")
        if len(sys.argv) > 1:
            run = root / sys.argv[1]
        else:
            grpo(["--seed", "0", "--run-dir", str(run)])
        photograph(write_report(run), picture)
    print("docs/report.png")


if __name__ == "__main__":
    main()
