"""Machines as data: which one this is, what a user's own file adds, and that its mistakes are lines of it."""

import pytest

from polarlm.config import UserError
from polarlm.launch import known_sites, recognise, site_named


@pytest.mark.parametrize(
    ("host", "environment", "name"),
    [
        ("x3001c0s7b0n0.hsn.cm.polaris.alcf.anl.gov", {}, "polaris"),
        ("polaris-login-02", {}, "polaris"),
        ("x4102c0s0b0n0", {}, "aurora"),
        ("aurora-uan-0009", {}, "aurora"),
        ("x1921c0s0b0n0", {}, "sunspot"),
        ("uan-0001", {}, "sunspot"),
        ("sophia-gpu-07", {}, "sophia"),
        ("thetagpu12", {}, "thetagpu"),
        ("frontier00001", {}, "frontier"),
        ("nid001012", {"NERSC_HOST": "perlmutter"}, "perlmutter"),
        ("login12", {"SLURM_CLUSTER_NAME": "perlmutter"}, "perlmutter"),
        ("nid001012", {}, None),
        ("login12", {"NERSC_HOST": ""}, None),
        ("laptop", {}, None),
        ("x3", {}, None),
    ],
)
def test_a_machine_is_recognised(host, environment, name):
    found = recognise(host, environment)
    assert (found and found.name) == name


def test_every_machine_says_what_is_needed():
    sites = known_sites()
    assert {site.scheduler for site in sites.values()} == {"pbs", "slurm", "cobalt"}
    for site in sites.values():
        assert site.hosts
        assert site.launcher
        assert site.device
        assert site.devices_per_node
        assert site.source
    assert sites["aurora"].devices_per_node == 12
    assert sites["aurora"].environment == sites["sunspot"].environment
    assert sites["aurora"].binding[0].count(":") == 12
    assert sites["polaris"].environment["FI_CXI_DEFAULT_CQ_SIZE"] == "131072"


@pytest.fixture
def own(tmp_path, monkeypatch):
    def write(text):
        path = tmp_path / "polarlm" / "sites.yaml"
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)

    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    return write


def test_a_users_own_machine_counts_first(own):
    own("lab:\n  hosts: [x3001*]\n  launcher: mpich\n  environment: {NCCL_DEBUG: INFO, FI_X: 1}\n")
    lab = recognise("x3001c0s7b0n0", {})
    assert (lab.name, lab.launcher, lab.hosts) == ("lab", "mpich", ("x3001*",))
    assert lab.environment == {"NCCL_DEBUG": "INFO", "FI_X": "1"}
    assert recognise("x3002", {}).name == "polaris"
    assert next(iter(known_sites())) == "lab"


def test_a_field_of_a_known_machine_is_replaced_alone(own):
    own("polaris:\n  devices_per_node: 2\n  hosts: x3*\n  environment:\n    NCCL_NET_GDR_LEVEL: SYS\n")
    polaris = site_named("polaris")
    assert (polaris.devices_per_node, polaris.hosts, polaris.launcher) == (2, ("x3*",), "pals")
    assert polaris.environment["NCCL_NET_GDR_LEVEL"] == "SYS"
    assert polaris.environment["NCCL_CROSS_NIC"] == "1"


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ("lab: 5", r"sites\.yaml:1: lab is a mapping"),
        ("lab:\n  hosts: [n*]\n  launchr: pals", r"sites\.yaml:3: lab\.launchr: unknown field; did you mean launcher"),
        ("lab:\n  launcher: mpirun", r"sites\.yaml:2: lab\.launcher: 'mpirun': should be one of pals, mpich"),
        ("lab:\n  scheduler: lsf", r"sites\.yaml:2: lab\.scheduler: 'lsf': should be one of pbs"),
        ("lab:\n  devices_per_node: four", r"sites\.yaml:2: lab\.devices_per_node: 'four': should be a whole number"),
        ("lab:\n  hosts: [[n]]", r"sites\.yaml:2: lab\.hosts: .*: should be a list of words"),
        ("lab:\n  environment: [A]", r"sites\.yaml:2: lab\.environment: .*mapping"),
        ("lab:\n  environment: {A: [1]}", r"sites\.yaml:2: lab\.environment\.A: "),
        ("lab:\n  title: {a: b}", r"sites\.yaml:2: lab\.title\.a: title has no fields"),
        ("lab: [", r"sites\.yaml:1: not YAML|sites\.yaml:2: not YAML"),
    ],
)
def test_a_mistake_in_the_users_file_is_a_line_of_it(text, error, own):
    own(text)
    with pytest.raises(UserError, match=error):
        known_sites()


def test_an_unknown_name_says_which_come_near():
    with pytest.raises(UserError, match=r"no site 'polari'; did you mean polaris\?"):
        site_named("polari")
    with pytest.raises(UserError, match=r"there are polaris, aurora"):
        site_named("zzz")
