"""Scripts of other projects, which are cloned beside these studies."""

from collections.abc import Callable
from pathlib import Path

from raypar import RayparError

HERE = Path(__file__).parent


def cloned(repository: str, script: str) -> Callable[[object], None]:
    """Return a check for a script, which raises RayparError with the command that clones a missing one."""

    def check(_: object) -> None:
        if not (HERE / script).is_file():
            clone = f"git clone --depth 1 {repository} {HERE / Path(script).parts[0]}"
            raise RayparError(f"{HERE / script}: the script is not there", hint=clone)

    return check
