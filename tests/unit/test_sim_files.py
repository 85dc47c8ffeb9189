"""A simulation's file, the command that runs it, and its variants."""

from __future__ import annotations

import contextlib
import json
import os
import pty
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from das_adapter.cli import main
from das_adapter.errors import ConfigError, DasError
from das_adapter.sim import Simulation
from das_adapter.sim.config import parse, read, variants

SMALL: dict[str, Any] = {
    "steps": {"kind": "line", "line": {"base": 0.01, "token": 1e-4, "draft": 0.0}},
    "hardware": {"gpus": 2},
    "rollout": {
        "problems": 6,
        "samples": 4,
        "dataset": 12,
        "cap": 300,
        "prompt": 20,
        "lengths": {"mean": 80},
    },
    "arms": {"off": {"das": {"drafter": "none"}}, "history": {}},
}


def test_a_config_is_read_and_a_wrong_key_names_itself(tmp_path: Path) -> None:
    path = tmp_path / "sim.yaml"
    path.write_text("hardware: {gpus: 4}\narms: {off: {das: {drafter: none}}}\n")
    assert read(path).hardware.gpus == 4
    path.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ConfigError, match=r"sim\.yaml"):
        read(path)
    path.write_text("hardware: {gpu_count: 4}\n")
    with pytest.raises(
        ConfigError, match=r"hardware\.gpu_count: unknown key.* Allowed: gpu, gpus"
    ):
        read(path)
    for content, message in (
        ({"arms": {"a": {"das": {"draftr": "none"}}}}, "das.draftr"),
        (
            {"arms": {"a": {"strid": 2}}},
            "arms.a.strid: unknown key; did you mean 'stride'. Allowed: das, stride",
        ),
        ({"hardware": {"gpu": "tpu"}}, "hardware.gpu: found 'tpu', allowed: a100"),
        ({"model": "nobody/nothing"}, "model: found 'nobody/nothing'"),
        ({"hardware": {"gpus": 3, "per_engine": 2}}, "must be a multiple"),
        ({"model": "Qwen/Qwen2.5-72B"}, "raise hardware.per_engine"),
        ({"acceptance": {"history": "index"}}, "rollout.dump"),
        ({"steps": {"kind": "line", "line": {"bas": 1}}}, "steps.line"),
        (
            {
                "steps": {
                    "kind": "line",
                    "line": {"base": 1, "token": 1, "drafted_sizes": 1},
                }
            },
            "steps.line",
        ),
        (
            {"arms": {"a": {"das": {"drafter": "ngram"}}}},
            "acceptance.length: found null, needed with drafter: ngram",
        ),
        ({"acceptance": {"rates": []}}, "acceptance.rates: found .*at least 1 item"),
        (
            {"acceptance": {"rates": [[]]}},
            "acceptance.rates.0: found .*at least 1 item",
        ),
        ({"rollout": {"seed": -1}}, "rollout.seed: found -1"),
        (
            {"rollout": {"cap": 100}},
            "rollout.lengths.mean: found 2000.0, allowed: 1 to under",
        ),
    ):
        with pytest.raises(DasError, match=message):
            Simulation(parse(content)).run("off")
    with pytest.raises(ConfigError, match=r"stride needs .* no model that drafts"):
        Simulation(
            parse(SMALL | {"arms": {"a": {"das": {"drafter": "self"}, "stride": 2}}})
        ).run("a")


def test_the_command_simulates_and_varies(tmp_path: Path) -> None:
    path = tmp_path / "sim.yaml"
    path.write_text(json.dumps(SMALL))
    done = CliRunner().invoke(main, ["simulate", str(path), "--json"])
    assert done.exit_code == 0, done.output
    figures = json.loads(done.stdout)
    assert (
        figures["off"]["rollout_of_first"]
        == 1.0
        > figures["history"]["rollout_of_first"]
    )
    done = CliRunner().invoke(
        main, ["simulate", str(path), "--vary", "hardware.gpus=1,2"]
    )
    assert done.exit_code == 0 and "hardware.gpus=2" in done.output
    rates = ["--vary", "acceptance.rates=[[0.5],[0.65]],[[0.6]]"]
    done = CliRunner().invoke(main, ["simulate", str(path), "--json", *rates])
    assert [f["values"]["acceptance.rates"] for f in json.loads(done.stdout)] == [
        [[0.5], [0.65]],
        [[0.6]],
    ]
    for wrong in (
        "hardware.gpus",
        "hardware.gpus=",
        "acceptance.rates=[[0.5]",
        "hardware.gpus=1]",
    ):
        done = CliRunner().invoke(main, ["simulate", str(path), "--vary", wrong])
        assert done.exit_code == 2 and "KEY=V1,V2" in done.output


def test_run_ahead_is_varied_between_auto_and_off(tmp_path: Path) -> None:
    path = tmp_path / "sim.yaml"
    path.write_text(json.dumps(SMALL))
    varied = ["--vary", "arms.history.das.history.run_ahead=auto,off", "--json"]
    done = CliRunner().invoke(main, ["simulate", str(path), *varied])
    assert done.exit_code == 0 and len(json.loads(done.stdout)) == 2, done.output


def test_a_terminal_shows_how_far_a_simulation_is(tmp_path: Path) -> None:
    path = tmp_path / "sim.yaml"
    shown = b""
    path.write_text(json.dumps(SMALL))
    terminal, theirs = pty.openpty()
    command = [sys.executable, "-m", "das_adapter.cli", "simulate", str(path), "--json"]
    running = subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=theirs,
        env={**os.environ, "TERM": "xterm"},
    )
    os.close(theirs)
    with contextlib.suppress(OSError):  # its end
        while part := os.read(terminal, 4096):
            shown += part
    os.close(terminal)
    assert json.loads(running.communicate()[0])["off"]["rollout_of_first"] == 1.0
    assert b"history" in shown and b"1/2" in shown


def test_a_key_of_an_arm_that_is_there_by_default_is_varied() -> None:
    config = parse({key: value for key, value in SMALL.items() if key != "arms"})
    (_, one), (_, other) = variants(
        config, {"arms.history.das.max_draft_tokens": [1, 2]}
    )
    assert list(one.arms) == list(other.arms) == list(config.arms)
    assert (
        one.arms["off"] == config.arms["off"]
        and other.arms["history"].das["max_draft_tokens"] == 2
    )
