"""A configuration is read whole and checked, and a mistake in it is one line that says what to do."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvsp_services.config import read_config, with_limits_of
from kvsp_services.documents import DocumentError

COMMON = 'authorities_file = "ca.pem"\npolicy_file = "policy.toml"\n'
CERTIFICATE = 'certificate_file = "role.pem"\nkey_file = "role.key"\n'
INDEX = f'[index]\nbase_uri = "https://127.0.0.1:8441/kvsp/"\n{CERTIFICATE}'
HOLDER = f'[holder]\nbase_uri = "https://127.0.0.1:8442/kvsp/"\n{CERTIFICATE}index = ["https://127.0.0.1:8441/kvsp/"]\n'
HOST = '[[holder.tiers]]\ntier = "host"\ncapacity_bytes = 1000000\n'
DISK = '[[holder.tiers]]\ntier = "local-storage"\ncapacity_bytes = 1000000\ndirectory = "blocks"\n'
CONTROLLER = f'[controller]\nbase_uri = "https://127.0.0.1:8443/kvsp/"\n{CERTIFICATE}index = []\n'
MODEL = f'{CERTIFICATE}model_dir = "."\ncontroller = "https://127.0.0.1:8443/kvsp/"\n'
INSTANCE = f'[instance]\nbase_uri = "https://127.0.0.1:8444/kvsp/"\n{MODEL}index = ["https://127.0.0.1:8441/kvsp/"]\n'
LINK = '[[instance.links]]\nholder = "https://127.0.0.1:8442/kvsp/"\n'
RATE = "mbit_per_s = 1\n"
FRONT_END = f'[front_end]\nbase_uri = "https://127.0.0.1:8445/kvsp/"\n{MODEL}'


@pytest.fixture
def path(tmp_path: Path) -> Path:
    for name in ("ca.pem", "policy.toml", "role.pem", "role.key", "storage.key"):
        (tmp_path / name).touch()
    return tmp_path / "kvsp.toml"


def test_a_process_of_two_roles(path: Path) -> None:
    path.write_text(
        f'{COMMON}storage_key_file = "storage.key"\nloop = "asyncio"\n{INDEX}{HOLDER}{HOST}{DISK}'
    )
    config = read_config(path)
    assert list(config.roles) == ["index", "holder"]
    assert config.loop == "asyncio"
    assert config.index is not None
    assert config.index.address == ("127.0.0.1", 8441)
    assert config.holder is not None
    assert [tier.tier for tier in config.holder.tiers] == ["host", "local-storage"]
    assert config.policy_file == str(path.parent / "policy.toml")
    assert config.holder.tiers[1].directory == str(path.parent / "blocks")
    assert config.monitoring.enabled
    assert config.monitoring.host == "127.0.0.1"


@pytest.mark.parametrize(
    ("listen", "address"), [("0.0.0.0:9000", ("0.0.0.0", 9000)), ("[::1]:9000", ("::1", 9000))]
)
def test_a_role_may_listen_elsewhere(path: Path, listen: str, address: tuple[str, int]) -> None:
    path.write_text(f'{COMMON}{INDEX}listen = "{listen}"\n')
    section = read_config(path).index
    assert section is not None
    assert section.address == address


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (COMMON, "names no role"),
        (COMMON + INSTANCE + 'copies_to = "x"\n', "instance.copies_to: "),
        (
            COMMON + INSTANCE.replace("model_", "modell_"),
            "instance.modell_dir: unknown; did you mean model_dir?",
        ),
        (COMMON + INSTANCE.replace('"."', '"none"'), "instance.model_dir: there is no "),
        (COMMON + INSTANCE + LINK.replace("/kvsp/", "") + RATE, "links[0].holder: a base URI ends in"),
        (COMMON + INSTANCE + LINK + "mbit_per_s = -1\n", "mbit_per_s: expected an integer >= 0"),
        (
            COMMON + INSTANCE + f"prefill_tokens_per_s = {2**53}\n",
            "instance.prefill_tokens_per_s: expected an integer",
        ),
        (COMMON + CONTROLLER + 'classes.foo = "a"\n', "controller.classes.'foo': a base URI starts with"),
        (COMMON + FRONT_END, "scopes: a front end asks in one; add [[scopes]]"),
        ('policy_file = "policy.toml"\n' + INDEX, "missing: authorities_file"),
        (COMMON + INDEX + "max_tll_ms = 1\n", "index.max_tll_ms: unknown; did you mean max_ttl_ms?"),
        (COMMON + INDEX + "max_ttl_ms = 0\n", "index.max_ttl_ms: expected an integer >= 1"),
        (COMMON + 'loop = "gevent"\n' + INDEX, "loop: 'gevent' is unknown; known are asyncio, trio, uvloop"),
        (COMMON + INDEX.replace("https", "http"), "index.base_uri"),
        (COMMON + INDEX.replace("role.pem", "other.pem"), "index.certificate_file: there is no"),
        (COMMON + INDEX + 'listen = "nowhere:port"\n', "index.listen: expected HOST:PORT"),
        (COMMON + INDEX + 'listen = ":99999999"\n', "index.listen: expected HOST:PORT"),
        (COMMON + INDEX + 'listen = "a..b:8441"\n', "index.listen: expected the name or address of a host"),
        (COMMON + 'monitoring.host = "a\\u0000b"\n' + INDEX, "monitoring.host: expected the name or"),
        (
            COMMON + FRONT_END + f'api_host = "{"a" * 64}.example"\n',
            "front_end.api_host: expected the name or address of a host, such as 127.0.0.1",
        ),
        (COMMON + HOLDER.replace("8441/kvsp/", "8441/x") + HOST, "holder.index[0]"),
        (
            COMMON + HOLDER.replace('kvsp/"]', 'kvsp/", "https://127.0.0.1:8441/kvsp/"]') + HOST,
            "index: names one",
        ),
        (COMMON + HOLDER + DISK, "storage_key_file: holder stores on disk"),
        (COMMON + CONTROLLER, "storage_key_file: controller stores on disk"),
        (COMMON + HOLDER + HOST + 'directory = "x"\n', "holder.tiers[0]: tier host has no directory"),
        (
            COMMON + HOLDER + DISK.replace("directory", "# "),
            "holder.tiers[0]: tier local-storage needs a directory",
        ),
        (
            COMMON + INDEX + HOLDER.replace("8442", "8441") + HOST,
            "holder.listen: index listens there already",
        ),
    ],
)
def test_a_mistake_is_one_line_with_its_key(path: Path, text: str, said: str) -> None:
    path.write_text(text)
    with pytest.raises(DocumentError) as caught:
        read_config(path)
    assert said in str(caught.value)
    assert "kvsp.toml: " in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.requirement("SK-5")
@pytest.mark.parametrize("others", ["", CONTROLLER, HOLDER + HOST, CONTROLLER + HOLDER + HOST])
def test_an_index_is_given_no_scope_key(path: Path, others: str) -> None:
    stored = 'storage_key_file = "storage.key"\n'
    path.write_text(f'{COMMON}{stored}{INDEX}{others}[[scopes]]\nkey_file = "storage.key"\n')
    with pytest.raises(DocumentError, match="an index must not have Scope Keys"):
        read_config(path)


def test_limits_are_taken_over_and_every_other_change_is_named_by_its_key(path: Path) -> None:
    stored = 'storage_key_file = "storage.key"\n'
    path.write_text(COMMON + stored + INDEX + CONTROLLER + HOLDER + HOST)
    before = read_config(path)
    path.write_text(
        f'{COMMON}{stored}loop = "asyncio"\ndescriptor_files = ["ca.pem"]\nmonitoring.port = 1\n'
        f"{INDEX}max_ttl_ms = 7\n{CONTROLLER}min_active = 3\nprefetch = false\n[controller.classes]\n"
        f'"https://127.0.0.1:8444/kvsp/" = "a"\n'
    )
    after, differ = with_limits_of(before, read_config(path))
    assert after.index is not None
    assert after.controller is not None
    assert (after.index.max_ttl_ms, after.controller.min_active, after.controller.prefetch) == (7, 3, False)
    assert after.controller.classes == {}
    assert differ == ("descriptor_files", "loop", "monitoring.port", "holder", "controller.classes")
    assert with_limits_of(before, before) == (before, ())
    path.write_text(f'{COMMON}{stored}log.level = "debug"\n{INDEX}{CONTROLLER}{HOLDER}{HOST}')
    after, differ = with_limits_of(before, read_config(path))
    assert (after.log.level, differ) == ("debug", ())
