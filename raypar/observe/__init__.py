"""Observation of a training script from inside its own processes, without a change to the script.

raypar puts `raypar.observe.site` on the script's ``PYTHONPATH``. Its ``sitecustomize`` loads this package under the
name ``raypar_observer``, without raypar, and sets hooks when the script itself imports torch. `steps` and `ranks` read
the recorded events afterwards; all other modules run in the script and use the standard library only.
"""

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

FOLDER = "RAYPAR_OBSERVE"  # variable: the folder to which processes write their events
SETTINGS = "RAYPAR_OBSERVE_SETTINGS"  # variable: settings as a JSON object


def environment(folder: Path, inherited: Mapping[str, str], settings: Mapping[str, Any]) -> dict[str, str]:
    """Return the environment variables that make a script's processes record their events.

    Args:
        folder: to which they write.
        inherited: the script's other variables.
        settings: changes to the script (`raypar.observe.settings`).
    """
    paths = [str(Path(__file__).parent / "site"), *filter(None, [inherited.get("PYTHONPATH")])]
    return {FOLDER: str(folder), "PYTHONPATH": os.pathsep.join(paths), SETTINGS: json.dumps(dict(settings))}
