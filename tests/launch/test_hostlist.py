"""Lists of hosts are read in full, in order, or refused: Slurm's compressed names, counts, host files."""

import pytest

from polarlm.config import UserError
from polarlm.launch.machines.hostlist import (
    Host,
    expand_nodelist,
    expand_tasks,
    merge_hosts,
    parse_hosts,
    read_host_file,
)


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("n[1,2]", "n1 n2"),
        ("na,nb[001,003],nc", "na nb001 nb003 nc"),
        ("host-[001-002]", "host-001 host-002"),
        ("h[001,003-004,006]", "h001 h003 h004 h006"),
        ("rack[0-1]_blade[0-1]", "rack0_blade0 rack0_blade1 rack1_blade0 rack1_blade1"),
        ("nid[000009-000011]", "nid000009 nid000010 nid000011"),
        ("n[8-11]", "n8 n9 n10 n11"),
        ("n[098-101]", "n098 n099 n100 n101"),
        ("c[2,1]", "c2 c1"),
        ("gpu[1-2].local", "gpu1.local gpu2.local"),
        ("one", "one"),
        ("a,b", "a b"),
    ],
)
def test_b01_slurms_compressed_lists(text, names):
    assert expand_nodelist(text) == names.split()


@pytest.mark.parametrize(
    "text",
    [
        "h[1-",
        "h]1[",
        "h[[1]]",
        "h[1-2",
        "h[]",
        "h[3-1]",
        "h[a-b]",
        "h[1-2:2]",
        "a,,b",
        "",
        ",",
        "a b",
        "h[1;2]",
        "h{1,2}",
        "h[0-99999999]",
        "h[0-999][0-999]",
        f"h[{'9' * 5000}]",  # more digits than Python reads
    ],
)
def test_b01_an_unknown_form_is_an_error_and_never_one_node(text):
    with pytest.raises(UserError, match="SLURM_JOB_NODELIST"):
        expand_nodelist(text)


@pytest.mark.parametrize(("text", "counts"), [("4", [4]), ("4(x2),3", [4, 4, 3]), ("2,1", [2, 1]), ("1(x3)", [1] * 3)])
def test_slurms_counts_by_node(text, counts):
    assert expand_tasks(text) == counts


@pytest.mark.parametrize("text", ["", "4(2)", "x", "4,", "-1", "9" * 5000])
def test_other_counts_are_errors(text):
    with pytest.raises(UserError, match="SLURM_TASKS_PER_NODE"):
        expand_tasks(text)


def test_l17_full_and_short_names_are_one_machine():
    hosts = [Host("x3001.hsn.cm"), Host("x3002"), Host("x3001"), Host("X3002.local")]
    assert merge_hosts(hosts) == (Host("x3001.hsn.cm", 2), Host("x3002", 2))
    assert merge_hosts([Host("10.0.0.1"), Host("10.0.0.2")]) == (Host("10.0.0.1"), Host("10.0.0.2"))


def test_b03_a_last_line_without_a_newline_counts():
    assert read_host_file("a slots=2\nb slots=2", "f") == (Host("a", 2), Host("b", 2))


def test_b03_what_a_host_file_may_say():
    text = "# two machines\n\n  user@10.0.0.1 slots=2  # the first\nb:3\nc\nc\nfe80::1\n"
    hosts = read_host_file(text, "f")
    assert hosts == (Host("user@10.0.0.1", 2), Host("b", 3), Host("c", 2), Host("fe80::1"))
    assert hosts[0].address == "10.0.0.1"


@pytest.mark.parametrize(
    "line", ["hostB lots=8", "hostB slots=", "hostB slots=0", "host B", "a slots=2 slots=3", "a:b", "@"]
)
def test_b03_a_bad_entry_is_quoted_with_its_line(line):
    with pytest.raises(UserError) as error:
        read_host_file(f"hostA slots=8\n{line}\n", "hosts.txt")
    assert str(error.value).startswith(f"hosts.txt:2: {line!r}")


def test_b03_a_file_without_hosts_is_an_error():
    with pytest.raises(UserError, match=r"hosts\.txt: names no host"):
        read_host_file("# none\n\n", "hosts.txt")


def test_hosts_on_the_command_line():
    assert parse_hosts("a,b") == (Host("a"), Host("b"))
    assert parse_hosts("a:4, me@b:2") == (Host("a", 4), Host("me@b", 2))
    for wrong in ("a,", "a b", "", "a:0"):
        with pytest.raises(UserError, match="--hosts"):
            parse_hosts(wrong)
