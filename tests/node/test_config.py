"""Four sources, one configuration; every fault is one sentence."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from node.config import Config, ConfigError, Defaults, FlagValue, load
from node.option_values import Address
from node.options import OPTIONS, Option

DEFAULTS = Defaults(data_dir=Path("/data"), models_dir=Path("/cache/models"), host_name="kitchen", home=Path("/home/ada"))
KEY = "5e" * 32


def no_file(path: Path) -> str:
    raise FileNotFoundError(2, "No such file or directory", str(path))


def config(environ: dict[str, str] | None = None, file: str = "", **flags: FlagValue) -> Config:
    return load(flags, environ or {}, file, DEFAULTS, no_file)


def fault(environ: dict[str, str] | None = None, file: str = "", **flags: FlagValue) -> str:
    with pytest.raises(ConfigError) as caught:
        config(environ, file, **flags)
    message = str(caught.value)
    assert message
    assert "\n" not in message
    return message


def test_the_defaults_are_those_of_the_manual() -> None:
    assert config() == Config(
        data_dir=Path("/data"),
        models_dir=Path("/cache/models"),
        name="kitchen",
        cluster="default",
        cluster_key=None,
        listen=Address("127.0.0.1", 0),
        join=(),
        discovery=False,
        api=(Address("127.0.0.1", 52416), Address("::1", 52416)),
        api_is_default=True,
        api_keys=(),
        insecure_api=False,
        model="smollm2:135m",
        aliases=(),
        max_running=None,
        max_waiting=32,
        task_timeout_seconds=600.0,
        idle_unload_seconds=900.0,
        context=None,
        max_disk_bytes=None,
        max_memory_bytes=None,
        drain_timeout_seconds=30.0,
        log_format="console",
        log_level="info",
    )


@given(st.sets(st.sampled_from(["flag", "environment", "file"])))
def test_a_flag_beats_the_environment_which_beats_the_file_which_beats_the_default(sources: set[str]) -> None:
    flags: dict[str, FlagValue] = {"max_waiting": "1"} if "flag" in sources else {}
    environ = {"SHOAL_MAX_WAITING": "2"} if "environment" in sources else {}
    file = "max-waiting = 3" if "file" in sources else ""

    expected = 1 if "flag" in sources else 2 if "environment" in sources else 3 if "file" in sources else 32
    assert config(environ, file, **flags).max_waiting == expected


EXAMPLES = {
    "data-dir": "/d", "models-dir": "/m", "name": "den", "cluster": "home", "cluster-key": KEY, "listen": "0.0.0.0:4001",
    "join": "/ip4/192.0.2.7/tcp/4001", "discovery": "true", "api": "none", "api-key": "sk-1", "insecure-api": "true",
    "model": "none", "alias": "gpt-4o=smollm2:135m", "max-running": "4", "max-waiting": "0", "task-timeout": "5m",
    "idle-unload": "1h", "context": "2048", "max-disk": "40GB", "max-memory": "4GB", "drain-timeout": "0",
    "log-format": "json", "log-level": "debug",
}  # fmt: skip


@pytest.mark.parametrize("name", EXAMPLES)
def test_every_option_may_come_from_every_source_and_means_the_same(name: str) -> None:
    option = next(option for option in OPTIONS if option.name == name)
    text = EXAMPLES[name]
    flag: FlagValue = text == "true" if option.switch else [text] if option.repeatable else text

    by_flag = load({option.field: flag}, {}, "", DEFAULTS, no_file)
    by_environment = config({option.variable: text})

    assert by_flag == by_environment != config()
    if name != "data-dir":
        assert config(file=f'{name} = "{text}"') == config(file=f'{option.field} = "{text}"') == by_flag


def test_the_table_has_no_option_without_an_example() -> None:
    assert {option.name for option in OPTIONS} - set(EXAMPLES) == {"cluster-key-file"}


def test_the_file_takes_numbers_truth_values_and_lists() -> None:
    got = config(file='max-waiting = 7\ndrain_timeout = 0.5\ndiscovery = true\njoin = ["a:1", "b:2"]\napi-key = "one"\n')

    assert (got.max_waiting, got.drain_timeout_seconds, got.discovery) == (7, 0.5, True)
    assert (got.join, got.api_keys) == (("a:1", "b:2"), ("one",))


def test_a_repeatable_variable_has_commas_between_its_values() -> None:
    assert config({"SHOAL_JOIN": "a:1, b:2,"}).join == ("a:1", "b:2")


def test_a_higher_source_replaces_a_repeatable_option_whole() -> None:
    assert config({"SHOAL_JOIN": "a:1"}, join=["b:2"]).join == ("b:2",)


def test_an_empty_variable_counts_as_not_set() -> None:
    assert config({"SHOAL_NAME": "", "SHOAL_JOIN": "  "}) == config()


@pytest.mark.parametrize(
    ("message", "parts"),
    [
        (fault({"SHOAL_MAX_WAITING": "many"}), ["SHOAL_MAX_WAITING", "'many'"]),
        (fault(max_memory="4XB"), ["--max-memory", "'4XB'", "4GB"]),
        (fault(file="log-level = 'loud'"), ["'log-level' in /data/config.toml", "'loud'"]),
        (fault(file="max-wating = 3"), ["unknown key 'max-wating'", "/data/config.toml", "'max-waiting'"]),
        (fault(file="data-dir = '/x'"), ["'data-dir'", "/data/config.toml"]),
        (fault(file="max-waiting = 1\nmax_waiting = 2"), ["'max_waiting'", "twice"]),
        (fault(file="max-waiting = [1, 2]"), ["'max-waiting'"]),
        (fault(file="name = {a = 1}"), ["'name'"]),
        (fault(file="= 3"), ["/data/config.toml is no TOML"]),
        (fault(alias=["a=b", "a=c"]), ["--alias", "'a'", "'b'", "'c'"]),
        (fault(api=["none", "127.0.0.1:0"]), ["--api", "'none'"]),
        (fault(api=["0.0.0.0:80"]), ["--api", "0.0.0.0:80", "--api-key", "--insecure-api"]),
        (fault({"SHOAL_API": "127.0.0.1:1,[::]:80"}), ["SHOAL_API", "[::]:80"]),
        (fault(cluster_key="00" * 8), ["--cluster-key", "64 bits", "`node key`"]),
        (fault(cluster_key=KEY, cluster_key_file="/k"), ["--cluster-key", "--cluster-key-file"]),
        (fault(cluster_key_file="/k"), ["--cluster-key-file", "/k", "No such file"]),
        (fault(max_memory="0", model="x"), ["--model", "'x'", "max-memory 0"]),
    ],
)
def test_a_fault_is_one_sentence_with_option_source_and_value(message: str, parts: list[str]) -> None:
    assert [part for part in parts if part not in message] == []


def test_a_secret_is_never_repeated() -> None:
    assert "hunter2" not in fault(cluster_key="hunter2hunter2")
    assert "hunter2" not in fault(api_key=["is hunter2"])
    assert KEY not in repr(config(cluster_key=KEY, api_key=["sk-secret"]))
    assert "sk-secret" not in repr(config(api_key=["sk-secret"]))


def test_a_key_lets_the_node_listen_to_others_and_look_for_them() -> None:
    got = config(cluster_key=KEY)

    assert (got.cluster_key, got.listen, got.discovery) == (bytes.fromhex(KEY), Address("0.0.0.0", 0), True)
    assert config(cluster_key=KEY, listen="127.0.0.1:0").discovery is False
    assert config(cluster_key=KEY, discovery=False).discovery is False


def test_of_key_and_key_file_the_higher_source_wins() -> None:
    def other(path: Path) -> str:
        assert path == Path("/k")
        return "a0" * 16 + "\n"

    from_file = load({"cluster_key_file": "/k"}, {"SHOAL_CLUSTER_KEY": KEY}, "", DEFAULTS, other)
    from_flag = load({"cluster_key": KEY}, {"SHOAL_CLUSTER_KEY_FILE": "/k"}, "", DEFAULTS, other)

    assert from_file.cluster_key == b"\xa0" * 16
    assert from_flag.cluster_key == bytes.fromhex(KEY)


def test_an_open_api_needs_a_key_or_a_waiver() -> None:
    assert config(api=["0.0.0.0:80"], api_key=["k"]).api == (Address("0.0.0.0", 80),)
    assert config(api=["0.0.0.0:80"], insecure_api=True).api == (Address("0.0.0.0", 80),)
    assert config(api=["none"]).api == ()


def test_a_node_with_no_memory_for_runners_starts_without_the_default_model() -> None:
    got = config(max_memory="0")

    assert (got.max_memory_bytes, got.model) == (0, None)
    assert config(max_memory="0", model="none").model is None


def test_paths_start_where_they_were_written() -> None:
    assert config(models_dir="~/m").models_dir == Path("/home/ada/m")
    assert config({"SHOAL_MODELS_DIR": "m"}).models_dir == Path("m")
    assert config(file="models-dir = 'm'").models_dir == Path("/data/m")
    assert config(file="models-dir = '/m'").models_dir == Path("/m")
    assert config(file="models-dir = '~'").models_dir == Path("/home/ada")


def one_line_or_no_fault(environ: dict[str, str], file: str) -> None:
    try:
        config(environ, file)
    except ConfigError as error:
        message = str(error)
    else:
        return
    assert message
    assert "\n" not in message


@given(st.dictionaries(st.sampled_from(OPTIONS), st.text(max_size=12), max_size=4))
def test_any_text_gives_a_configuration_or_a_config_error(texts: dict[Option, str]) -> None:
    one_line_or_no_fault({option.variable: text for option, text in texts.items()}, "")


@given(
    st.one_of(st.text(max_size=40), st.sampled_from(OPTIONS).map(lambda option: option.name + " = ["), st.just("join = [[1]]"))
)
def test_any_file_gives_a_configuration_or_a_config_error(text: str) -> None:
    one_line_or_no_fault({}, text)
