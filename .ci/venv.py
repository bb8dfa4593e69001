"""Make the virtualenv of the Makefile, unless the one that is there will do.

    python3 .ci/venv.py VENV CONSTRAINTS [--this-python]

Written for any Python from 3.6 up, so that one that is too old gets a sentence, not a traceback.
"""

import os
import shutil
import subprocess
import sys

OLDEST = (3, 11)
NEWEST_TESTED = 13  # minor release of Python 3


def main():
    """Leave a virtualenv with the tested pip at VENV, or exit with one line that says why not."""
    venv, constraints = sys.argv[1:3]
    why = reason_to_make(venv, this_python="--this-python" in sys.argv[3:])
    if why is None:
        return
    if sys.version_info < OLDEST:
        sys.exit(too_old())
    if os.path.exists(venv):
        if not os.path.exists(os.path.join(venv, "pyvenv.cfg")):
            sys.exit(f"paceline: VENV={venv} exists and is no virtualenv; name another folder")
        print(f"making {venv} anew: {why}", file=sys.stderr)
        shutil.rmtree(venv)
    if not made(venv, constraints):
        shutil.rmtree(venv, ignore_errors=True)
        sys.exit(f"paceline: no virtualenv could be made at {venv}; the lines above say why")


def made(venv, constraints):
    """Make a virtualenv with the tested pip; return whether that went well."""
    if subprocess.call([sys.executable, "-m", "venv", venv]) != 0:
        return False
    pip = [os.path.join(venv, "bin", "python"), "-m", "pip", "--disable-pip-version-check"]
    if subprocess.call([*pip, "install", "--quiet", "--constraint", constraints, "pip"]) != 0:
        return False
    with open(stamp(venv), "w", encoding="utf-8") as out:
        out.write(os.path.realpath(venv))
    return True


def reason_to_make(venv, this_python):
    """Return why the virtualenv at a path cannot be used, or None when it can.

    Args:
        this_python: It must have the Python that runs this; otherwise any it was made with.
    """
    if not os.path.exists(stamp(venv)):
        return "it is not whole"
    version = version_of(os.path.join(venv, "bin", "python"))
    if version is None:
        return "its Python is gone"
    if this_python and version != sys.version_info[:2]:
        asked = "{}.{}".format(*sys.version_info[:2])
        return f"it has Python {version[0]}.{version[1]}, and {asked} was asked for"
    with open(stamp(venv), encoding="utf-8") as kept:
        return None if kept.read() == os.path.realpath(venv) else "it was made in another place"


def version_of(python):
    """Return the release of a Python that has pip, or None."""
    ask = [python, "-c", "import pip, sys; print(*sys.version_info[:2])"]
    try:
        answer = subprocess.check_output(ask, stderr=subprocess.DEVNULL)
    except (OSError, subprocess.CalledProcessError):
        return None
    return tuple(int(part) for part in answer.split())


def stamp(venv):
    """Return the file that is written last; it says where the virtualenv was made."""
    return os.path.join(venv, ".made")


def too_old():
    """Say which Python this is, and how to give another."""
    names = [f"python3.{minor}" for minor in range(NEWEST_TESTED, OLDEST[1] - 1, -1)]
    here = [name for name in names if shutil.which(name)]
    name = here[0] if here else f"/path/to/{names[0]}"
    version = "{}.{}".format(*sys.version_info[:2])
    return (
        f"paceline: needs Python 3.11 or newer, and {sys.executable} is {version}; "
        f"name another, for example: make serve PYTHON={name}"
    )


if __name__ == "__main__":
    main()
