"""conftest.py: read by pytest first: tests may import what lies in dev/ and scripts/."""
import pathlib
import sys

ROOT = pathlib.Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "dev"))
sys.path.append(str(ROOT / "scripts"))      # last: tensorboard.py is not the package of that name
