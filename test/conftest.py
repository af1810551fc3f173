"""conftest.py: read by pytest first: tests may import what lies in dev/."""
import pathlib
import sys

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent / "dev"))
