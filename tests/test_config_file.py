"""From config files and --set to a run config: names, bases, interventions, and who has precedence."""

import json
import re
from pathlib import Path

import pytest
import yaml
from small_configs import LEAST, Configs

from training.config import config_mapping
from training.config_check import ConfigError, config_from_mapping
from training.config_file import INTERVENTIONS, load_run_config, run_name
from training.errors import UserError
from training.yaml_reader import parse_yaml, yaml_text


def test_who_has_precedence(configs: Configs) -> None:
    """Defaults < base < own keys < interventions in order < --set, key by key."""
    configs.write(LEAST + "seeds: {weights: 1, training: 2}\noptimizer: {learning_rate: 1, eps: 1e-7}\n", "grandparent")
    configs.write("base: grandparent\nseeds: {training: 3}\noptimizer: {clip_norm: 9}\n", "parent")
    own = "base: parent\ninterventions: [gradient-clipping, weight-decay-gpt2, weight-decay-cerebras]\n"
    path = configs.write(own + "optimizer: {learning_rate: 2, weight_decay: 0.5}\nmodel: {qkv_bias: true}\n")
    config = load_run_config(str(path), ["seeds.weights=4", "seeds.weights=5", "optimizer={eps: 1e-6}"])
    assert (config.seeds.weights, config.seeds.training) == (5, 3)
    optimizer = config.optimizer
    assert (optimizer.learning_rate, optimizer.weight_decay, optimizer.clip_norm) == (2, 0.33724, 3.5)
    assert (optimizer.eps, optimizer.betas) == (1e-6, (0.9, 0.999))
    assert config.model.qkv_bias
    assert config.interventions == ("gradient-clipping", "weight-decay-gpt2", "weight-decay-cerebras")
    assert config.overrides == ("seeds.weights=4", "seeds.weights=5", "optimizer={eps: 1e-6}")


def test_interventions_add_up_over_bases(configs: Configs) -> None:
    """Those of the base come first; an own key outdoes them, an own intervention that. --set replaces the own ones."""
    configs.write(LEAST + "interventions: [no-dropout, gradient-clipping]\n", "parent")
    path = str(configs.write("base: parent\ninterventions: [qkv-bias, no-dropout]\noptimizer: {clip_norm: 1}\n"))
    config = load_run_config(path)
    assert config.interventions == ("no-dropout", "gradient-clipping", "qkv-bias")
    assert (config.model.dropout, config.model.qkv_bias, config.optimizer.clip_norm) == (0, True, 1)
    config = load_run_config(path, ["interventions=[weight-tying]", "optimizer.clip_norm=2"])
    assert config.interventions == ("no-dropout", "gradient-clipping", "weight-tying")
    assert (config.model.qkv_bias, config.model.tie_weights, config.optimizer.clip_norm) == (False, True, 2)
    assert load_run_config(path, ["interventions=null"]).interventions == ("no-dropout", "gradient-clipping")


@pytest.mark.parametrize(
    ("below", "above", "schedule"),
    [
        ("{name: cosine, warmup_percent: 7}", "{final_fraction: 0}", {"warmup_percent": 7, "final_fraction": 0}),
        ("{name: cosine, warmup_percent: 7}", "{name: cosine}", {"warmup_percent": 7, "final_fraction": 0.1}),
        ("{name: cosine, warmup_percent: 7}", "{name: constant}", {}),
        ("{name: constant}", "{name: cosine}", {"warmup_percent": 5, "final_fraction": 0.1}),
        ("{warmup_percent: 7}", "{name: cosine}", {"warmup_percent": 7, "final_fraction": 0.1}),
    ],
)
def test_a_schedule_of_another_name_starts_anew(
    configs: Configs, below: str, above: str, schedule: dict[str, float]
) -> None:
    """And one without a name takes what is set over it, in whatever order the two come."""
    expected = {"name": "cosine" if schedule else "constant", **schedule}
    configs.write(LEAST + f"schedule: {below}\n", "parent")
    path = str(configs.write(f"base: parent\nschedule: {above}\n"))
    assert config_mapping(load_run_config(path))["schedule"] == expected
    for config in (
        configs.load(f"schedule: {below}", f"schedule={above}"),
        configs.load("", f"schedule={below}", f"schedule={above}"),
    ):
        assert config_mapping(config)["schedule"] == expected


def test_naming_the_optimizer_keeps_what_the_base_sets(configs: Configs) -> None:
    configs.write(LEAST + "optimizer: {learning_rate: 0.01}\n", "parent")
    config = load_run_config(str(configs.write("base: parent\noptimizer: {name: adamw, weight_decay: 0}\n")))
    assert (config.optimizer.learning_rate, config.optimizer.weight_decay) == (0.01, 0)


def test_a_base_is_beside_its_config_or_among_the_shipped_ones(configs: Configs, tmp_path: Path) -> None:
    (tmp_path / "sub").mkdir()
    configs.write(LEAST + "seeds: {weights: 7}\n", "sub/parent")
    for base in ("sub/parent", "sub/parent.yaml", "./sub/../sub/parent", str(tmp_path / "sub/parent.yaml")):
        assert load_run_config(str(configs.write(f"base: {base}\n"))).seeds.weights == 7
    assert load_run_config(str(configs.write("base: test\n"))).optimizer.clip_norm == 3.5
    configs.write(LEAST + "seeds: {weights: 8}\n", "test")
    assert load_run_config(str(configs.write("base: test\n"))).seeds.weights == 8
    assert load_run_config(str(configs.write(LEAST)), ["base=test"]).seeds.weights == 8


@pytest.mark.parametrize(
    ("files", "problem"),
    [
        ({"run": "base: run"}, "run.yaml: base leads back to this file"),
        ({"run": "base: a", "a": "base: b", "b": "base: a"}, "a.yaml: base leads back to this file"),
        ({"run": "base: ./../{folder}/run"}, "run.yaml: base leads back to this file"),
        ({"run": "base: nowhere"}, "run.yaml: base: nowhere: there is no configs/nowhere.yaml"),
        (
            {"run": "base: a", "a": "base: tinny"},
            "a.yaml: base: tinny: there is no configs/tinny.yaml; did you mean tiny?",
        ),
        ({"run": "base: sub/nowhere"}, "run.yaml: base: sub/nowhere: there is no such file"),
        ({"run": "base: 5"}, "run.yaml: base: must be the name of another config, got 5"),
        ({"run": "base: [a, b]"}, "run.yaml: base: must be the name of another config"),
        ({"run": "base: ''"}, "run.yaml: base: : there is no configs/.yaml"),
        ({"run": "base: a", "a": "- b"}, "a.yaml: must hold sections and keys"),
    ],
)
def test_bases_that_lead_nowhere(configs: Configs, files: dict[str, str], problem: str) -> None:
    for name, text in files.items():
        configs.write(text.replace("{folder}", configs.folder.name), name)
    with pytest.raises(UserError, match=re.escape(problem)):
        load_run_config(str(configs.folder / "run.yaml"))


def test_interventions_that_do_not_exist(configs: Configs) -> None:
    configs.write(LEAST + "interventions: [no-clipping]\nname: x\n", "parent")
    problems = configs.problems("base: parent\ninterventions: [dropout, 77]\nseeds: {weights: -1}\n")
    assert problems[0].startswith(f"{configs.folder}/parent.yaml: name: unknown key")
    assert f"{configs.folder}/parent.yaml: interventions: no-clipping is not one" in problems[1]
    assert problems[2:] == [
        'interventions: must be a list of names, got ["dropout", 77]',
        "seeds.weights: must be greater than or equal to 0, got -1",
    ]
    far = configs.problems(LEAST, "interventions=[xyz]")
    assert far[0].startswith("interventions: xyz is not one; there are ")
    assert all(name in far[0] for name in yaml.safe_load(INTERVENTIONS.read_text()))
    for text in ("no-dropout", "0", "''", "{no-dropout: true}", "true"):
        assert "must be a list of names" in configs.problems(LEAST, f"interventions={text}")[0]


@pytest.mark.parametrize("text", ["5", "{optimizer: {clip_norm: 1}}", "{set: 5}", "{set: [a]}", "null"])
def test_an_intervention_without_values(configs: Configs, monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    monkeypatch.setattr("training.config_file.INTERVENTIONS", configs.write(f"mine: {text}", "interventions"))
    with pytest.raises(ConfigError, match=r"interventions.yaml: mine: must have a section `set`"):
        configs.load("interventions: [mine]")


def test_the_resolved_config_is_read_back_as_it_was(configs: Configs) -> None:
    overrides = ["schedule={name: cosine, warmup_percent: 0.57}", "optimizer.eps=1e-12", "data.tokenizer='1e3'"]
    config = configs.load("interventions: [no-amp, qkv-bias]\nevaluation: {every: null}\n", *overrides)
    for mapping in (
        config_mapping(config),
        json.loads(json.dumps(config_mapping(config))),
        parse_yaml(yaml_text(config_mapping(config)), "here"),
    ):
        assert mapping["resolved"] is True
        assert config_from_mapping({"name": "run", **mapping}, "here") == config


def test_a_run_can_start_from_the_record_of_another(configs: Configs) -> None:
    """Its base, interventions and overrides are in the values and not applied again; new ones have no effect there."""
    original = configs.load("interventions: [no-dropout]\n", "optimizer.clip_norm=1", "base=test")
    record = configs.write("# resolved\n" + yaml_text(config_mapping(original)), "record")
    again = load_run_config(str(record), ["optimizer.clip_norm=2"])
    assert again.model == original.model
    assert (again.name, again.optimizer.clip_norm) == ("record", 2)
    assert again.interventions == original.interventions
    assert again.overrides == ("optimizer.clip_norm=2",)
    child = load_run_config(str(configs.write("base: record\ninterventions: [qkv-bias]\n")))
    assert child.interventions == (*original.interventions, "qkv-bias")
    assert child.overrides == ()
    for override in ("base=test", "interventions=[qkv-bias]"):
        with pytest.raises(ConfigError, match=r"record.yaml is the record of a run"):
            load_run_config(str(record), [override])
    record.write_text(record.read_text() + "name: other\n")
    with pytest.raises(ConfigError, match=r"record.yaml: name: unknown key"):
        load_run_config(str(record))


@pytest.mark.parametrize(
    "override", ["foo", "seeds.weights", "=3", " = 3", "seeds..weights=3", ".seeds=3", "seeds.=3", ""]
)
def test_an_override_must_be_key_and_value(configs: Configs, override: str) -> None:
    with pytest.raises(ConfigError, match=rf"^--set {re.escape(override)}: must be KEY=VALUE, as in --set "):
        configs.load("", override)


@pytest.mark.parametrize(
    ("override", "problem"),
    [
        ("name=other", "--set name=other: name: unknown key; the run's name is that of its file"),
        ("overrides=[a]", "--set overrides=[a]: overrides: unknown key"),
        ("resolved=true", "--set resolved=true: resolved: unknown key"),
        ("seeds.weights=[1", "--set seeds.weights=[1, line 1: expected ',' or ']'"),
        ("seeds.weights=*a", "--set seeds.weights=*a, line 1: found undefined alias"),
        ("seeds.weights=!!int '5'", "--set seeds.weights=!!int '5', line 1: the tag "),
        ("seeds.weights.x=3", 'run.yaml with --set: seeds.weights: must be a valid integer, got {"x": 3}'),
        ("seeds.weights=", "run.yaml with --set: seeds.weights: must be a valid integer, got null"),
        ("seeds.weights=1=2", "run.yaml with --set: seeds.weights: must be a valid integer, got '1=2'"),
        (
            "optimizer.lr=1",
            "run.yaml with --set: optimizer.lr: unknown key; the keys here are optimizer.name, optimizer.learning_rate",
        ),
    ],
)
def test_overrides_that_mean_nothing(configs: Configs, override: str, problem: str) -> None:
    with pytest.raises(UserError, match=re.escape(problem)):
        configs.load("", override)


def test_the_run_is_named_after_its_file(configs: Configs) -> None:
    for run, name in (("tiny", "tiny"), ("configs/tiny.yaml", "tiny"), ("a/b.c.yml", "b.c"), ("x.yaml", "x")):
        assert run_name(run) == name
    for name in ("a b", ".hidden", "-x", "\u00fc"):
        with pytest.raises(ConfigError, match=r": name: must be a name of letters.* that stays in its folder, got"):
            load_run_config(str(configs.write(LEAST, name)))


@pytest.mark.parametrize(
    ("run", "problem"),
    [
        ("tinny", "tinny: there is no configs/tinny.yaml; did you mean tiny?"),
        ("interventions-1", "interventions-1: there is no configs/interventions-1.yaml"),
        ("..", "..: is a folder; the run comes first"),
        ("", ": there is no configs/.yaml"),
        ("configs/", "configs/: is a folder; the run comes first, then the folder of the datasets"),
        ("../configs/tiny", "../configs/tiny: there is no such file; give a YAML file or the name of a config"),
        ("nowhere.yaml", "nowhere.yaml: there is no such file"),
        ("/etc", "/etc: is a folder; the run comes first"),
    ],
)
def test_a_run_that_is_not_there(run: str, problem: str) -> None:
    with pytest.raises(ConfigError, match=f"^{re.escape(problem)}"):
        load_run_config(run)


def test_a_run_that_came_without_its_config(tmp_path: Path) -> None:
    """Its record is here: how to go on. To go on, another config is not meant, however alike its name."""
    folder = tmp_path / "tinny"
    with pytest.raises(ConfigError, match=r"^tinny: there is no configs/tinny.yaml and no .*/tinny/config.yaml, so no"):
        load_run_config("tinny", goes_on=True, folder=folder)
    with pytest.raises(ConfigError, match=r"did you mean tiny\?"):
        load_run_config("tinny", folder=folder)
    folder.mkdir()
    (folder / "config.yaml").write_text(LEAST)
    for goes_on in (True, False):
        with pytest.raises(ConfigError) as caught:
            load_run_config("tinny", goes_on=goes_on, folder=folder)
        assert str(caught.value).endswith(f"to go on with it: cp {folder}/config.yaml configs/tinny.yaml")
