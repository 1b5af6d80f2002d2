"""A short storm on real processes, by the command that users have."""

from __future__ import annotations

import json
from pathlib import Path

from click.testing import CliRunner
from replicas import result_in

from diloco_cloud.chaos.compare import FAULTS_PER_REPLICA_HOUR, Settings, fitting_round_s
from diloco_cloud.cli.main import cli

COMMAND = "chaos --replicas 4 --minutes 0.12 --round 1s --faults-per-hour 90 --scale 20 --seed 2"


def test_a_storm_passes_the_referee(tmp_path: Path) -> None:
    arguments = [*COMMAND.split(), "--keep", str(tmp_path), "--json"]
    done = CliRunner().invoke(cli, arguments)
    assert done.exit_code == 0, done.output
    report = json.loads(done.stdout)
    storm = report["storm"]
    assert storm["faults"]["kill"] >= 1
    assert storm["recovered"] == len(storm["recoveries"]) == storm["faults"]["kill"]
    assert report["calm"]["participation"] > 3
    assert storm["violations"] == report["calm"]["violations"] == []
    assert storm["states"] > 5
    assert report["rounds_kept"] > 0.5
    assert "is started again, as attempt 1" in done.stderr
    assert (result_in(tmp_path / "store" / "storm") / "model.safetensors").exists()


def test_a_big_fleet_gets_longer_rounds() -> None:
    assert fitting_round_s(2) == 2.0
    assert fitting_round_s(1000) > 2.0


def test_the_default_storm_is_a_half_hour_of_ft_diloco_in_three_minutes() -> None:
    settings = Settings()
    faults = FAULTS_PER_REPLICA_HOUR * settings.replicas * settings.seconds / 3600
    assert faults * settings.scale == 45
    assert settings.seconds * settings.scale == 1800
    assert settings.fleet().heartbeat_s == 0.5
