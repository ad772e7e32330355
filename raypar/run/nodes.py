"""What the nodes of the cluster that this process is connected to have installed."""

from __future__ import annotations

from collections.abc import Mapping

from raypar.provenance import PACKAGES

VERSIONS_TIMEOUT_S = 60.0


def versions_of_nodes() -> dict[str, Mapping[str, str]]:
    """By address: the version of Python and of each package that decides on a timing.

    Raises:
        ray.exceptions.GetTimeoutError: a node doesn't answer.
    """
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    packages = PACKAGES

    def told() -> dict[str, str]:  # in here: it travels by value, to nodes that may have another raypar, or none
        import platform
        from importlib import metadata

        found = {"python": platform.python_version()}
        for name in packages:
            try:
                found[name] = metadata.version(name)
            except metadata.PackageNotFoundError:
                continue
        return found

    asked = {
        node["NodeManagerAddress"]: ray.remote(num_cpus=0)(told)
        .options(scheduling_strategy=NodeAffinitySchedulingStrategy(node["NodeID"], soft=False))
        .remote()
        for node in ray.nodes()
        if node["Alive"]
    }
    return dict(zip(asked, ray.get(list(asked.values()), timeout=VERSIONS_TIMEOUT_S), strict=True))
