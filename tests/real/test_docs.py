"""Commands of the documentation, run as printed, except for their ports and the files that they leave to the reader."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from harness import BIN, digits_study, environment

from raypar.track.server import Server, free_port

DOCS = Path(__file__).parents[2] / "docs"
PORT = re.compile(r"\b5000\b")
STUDY = digits_study('{"batch_size": grid(64, 128)}')
# MLflow's own settings, with a cache: it would hash the password for every request.
SETTINGS = """
[mlflow]
default_permission = READ
database_uri = sqlite:///basic_auth.db
admin_username = admin
authorization_function = mlflow.server.auth:authenticate_request_basic_auth
auth_cache_ttl_seconds = 600
"""
# Prints the number of cores that it may run on.
SHOW = """
import json, os
print(json.dumps({"num_cores": len(os.sched_getaffinity(0))}))
"""


def section(page, title):
    """Return the text below a heading of a page, up to the next heading of the same level or above."""
    level, found, in_code = 0, [], False
    for line in (DOCS / page).read_text(encoding="utf-8").splitlines(keepends=True):
        in_code ^= line.startswith("```")  # where comments look like headings
        heading = None if in_code else re.match(r"(#+) (.+)", line)
        if heading and level and len(heading[1]) <= level:
            break
        if heading and heading[2] == title:
            level = len(heading[1])
        elif level:
            found.append(line)
    assert level, f"{page} has no section {title}"
    return "".join(found)


def blocks(text, language):
    return re.findall(rf"^```{language}\n(.*?)^```", text, re.MULTILINE | re.DOTALL)


def write_files(cli, text):
    """Write each block of Python that begins with the name of its file."""
    for block in blocks(text, "python"):
        if name := re.match(r"# (\w+\.py)\n", block):
            cli.write(name[1], block)


def raypars(text):
    """Return the ``raypar …`` lines of a text's shell blocks, without comments."""
    lines = [re.split(r" +# ", line)[0] for block in blocks(text, "sh") for line in block.splitlines()]
    return [line for line in lines if line.startswith("raypar ")]


def run_shell(cli, commands, **changes):
    """Run shell commands in the folder; return their exit code and outputs together."""
    how = {**cli.how(PATH=f"{BIN}:{os.environ['PATH']}", **changes), "stdout": subprocess.PIPE}
    done = subprocess.run(["bash", "-euc", commands], stderr=subprocess.STDOUT, **how)
    return done.returncode, done.stdout


def all_done(cli, commands, **changes):
    code, printed = run_shell(cli, commands, **changes)
    assert code == 0, printed
    return printed


# ---- an MLflow server with a password


@pytest.fixture
def protected(cli, tmp_path_factory):
    """Start the documented server with a password; yield the documented commands of its client, and its address."""
    pytest.importorskip("flask_wtf", reason="needs mlflow[auth]")
    starts, use = blocks(section("mlflow.md", "A server with a password"), "sh")
    port, folder = str(free_port(22_500)), tmp_path_factory.mktemp("server")
    exports, command = PORT.sub(port, starts).split("mlflow server", 1)
    script = f"{exports}exec {sys.executable} -m mlflow server --workers 1 {command}"
    (folder / "auth.ini").write_text(SETTINGS)
    with (folder / "log").open("wb") as log:
        env = environment(PATH=f"{BIN}:{os.environ['PATH']}", MLFLOW_AUTH_CONFIG_PATH=str(folder / "auth.ini"))
        how = {"cwd": folder, "env": env, "stdin": subprocess.DEVNULL, "stdout": log, "stderr": log}
        process = subprocess.Popen(["bash", "-euc", script], start_new_session=True, **how)
    with Server(f"http://127.0.0.1:{port}", process) as server:
        assert server.answers(), (folder / "log").read_text()
        yield PORT.sub(port, use), server.url


@pytest.mark.mlflow
@pytest.mark.ray
@pytest.mark.timeout(900)
def test_a_study_is_stored_on_a_server_with_a_password(cli, protected):
    commands, url = protected
    cli.write("s.py", STUDY)
    refused = cli.run("study", "s.py", MLFLOW_TRACKING_URI=url, HOME=str(cli.folder))
    assert refused.returncode == 2 and "asks for a user and a password" in refused.stderr
    printed = all_done(cli, commands)
    assert "[2/2]" in printed and "are not in the store yet" not in printed
    assert re.search(r"^s +1 +2 ", printed, re.MULTILINE), "raypar list"
    assert printed.count("s: 2 points, 2 trials") == 2, "of the study and of `raypar report`"
    assert not (cli.folder / "mlflow.db").exists()
    # By a file instead of the environment.
    (of_file,) = blocks(section("mlflow.md", "A server with a password"), "text")
    (cli.folder / ".mlflow").mkdir()
    cli.write(".mlflow/credentials", of_file)
    assert "2 trials" in cli.done("report", "s", MLFLOW_TRACKING_URI=url, HOME=str(cli.folder))


@pytest.mark.mlflow
@pytest.mark.timeout(900)
def test_a_user_without_the_permission_keeps_the_results_until_it_is_granted(cli, protected):
    from mlflow import MlflowClient
    from mlflow.server import get_app_client

    commands, url = protected
    (grant,) = blocks(section("mlflow.md", "A server with a password").replace("\n  ", "\n"), "python")
    admin = dict(re.findall(r"(MLFLOW_TRACKING_(?:USERNAME|PASSWORD))=(\S+)", commands))
    bob = dict(zip(admin, re.findall(r'create_user\("(\w+)", "(.+?)"\)', grant)[0], strict=True))
    uri = {"MLFLOW_TRACKING_URI": url}
    cli.write("s.py", STUDY)
    cli.done("study", "s.py", "--no-ray", **uri, **admin)
    with pytest.MonkeyPatch.context() as patch:
        for name, value in admin.items():
            patch.setenv(name, value)
        experiment = MlflowClient(url).get_experiment_by_name("s").experiment_id
        add, permit = re.findall(r"^auth\.(?:create_user|grant_user_permission).*?\)", grant, re.MULTILINE)
        auth = get_app_client("basic-auth", tracking_uri=url)
        exec(add, {"auth": auth})
        printed = cli.done("study", "s.py", "--no-ray", "--repeats", "2", **uri, **bob)
        assert "are not in the store yet" in printed
        refused = cli.run("store", "sync", **uri, **bob)
        assert refused.returncode != 0 and "permission EDIT" in refused.stdout + refused.stderr
        exec(permit.replace('"1"', repr(experiment)), {"auth": auth})
    assert "0 are left on disk" in cli.done("store", "sync", **uri, **bob)
    assert "2 points, 4 trials" in cli.done("report", "s", **uri, **bob)


# ---- own loader, pinning


@pytest.mark.ray
def test_the_study_with_its_own_loader_runs_as_printed(cli):
    text = section("studies.md", "Your own DataLoader")
    write_files(cli, text)
    (command,) = raypars(text)
    printed = all_done(cli, command)
    assert "own_loader: 2 points, 6 trials" in printed and "[6/6]" in printed


@pytest.mark.ray
@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="this system can't bind processes to cores")
def test_workers_run_on_any_core_once_pinning_is_off(cli):
    cli.write("show.py", SHOW)
    cli.write(
        "study.py",
        "from raypar import Study, Workload\n"
        'workload = Workload.from_command("python show.py", fresh_process=True)\n'
        'study = Study(workload=workload, num_repeats=1, metric="num_cores", mode="max")\n',
    )
    commands = [
        line.replace("FILE", "study.py") for line in raypars(section("studies.md", "CPU affinity: how to stop pinning"))
    ]
    all_done(cli, "\n".join(commands))
    cli.done("store", "export", "study", "study.csv")
    import pandas as pd

    trials = pd.read_csv(cli.folder / "study.csv", dtype=str).set_index("config.cpu_affinity")
    assert trials["final.num_cores"].astype(float).astype(int).to_dict() == {
        "1": 1,
        "off": len(os.sched_getaffinity(0)),
    }


# ---- other tools

TOOLS = ("Ray Tune", "Optuna", "hyperfine", "Lightning", "W&B sweeps")


@pytest.mark.ray
@pytest.mark.timeout(900)
@pytest.mark.parametrize("tool", TOOLS)
def test_the_counterpart_of_another_tool_runs_as_printed(cli, tool):
    if tool == "Lightning":
        pytest.importorskip("lightning")
    page = (DOCS / "other_tools.md").read_text(encoding="utf-8")
    write_files(cli, page.split("\n## ")[0])
    text = section("other_tools.md", tool)
    write_files(cli, text)
    (command,) = raypars(text)
    printed = all_done(cli, command)
    (num_trials,) = {int(number) for number in re.findall(r"\d+ points, (\d+) trials", printed)}
    assert f"[{num_trials}/{num_trials}]" in printed and "failed" not in printed


@pytest.mark.timeout(600)
def test_the_counterpart_of_asv_finds_the_slower_commit(cli):
    write_files(cli, section("other_tools.md", "asv"))
    git = ["git", "-c", "user.name=a", "-c", "user.email=a@b"]

    def run_git(*words):
        subprocess.run([*git, *words], cwd=cli.folder, check=True)

    run_git("init", "-qb", "main", ".")
    for number, branch in ((100, "change"), (20_000, "")):
        cli.write("train.py", f"sum(i * i for i in range({number}_000))\n")
        run_git("add", "speed.py", "train.py")
        run_git("commit", "-qm", str(number))
        if branch:
            run_git("checkout", "-qb", branch)
    (command,) = raypars(section("other_tools.md", "asv"))
    code, printed = run_shell(cli, f"{command} --no-ray --budget 60s")
    assert code == 1 and "slower" in printed, printed
