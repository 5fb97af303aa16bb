"""Strings that are given as places: what each of them becomes, for every call that takes one."""

import os
from pathlib import Path

import pytest

import aiockpt
from aiockpt.storage.address import Address, parse_address

HOME = os.path.expanduser("~")

SLIPS = {
    '"s3://b/run"': "quotes.* write s3://b/run[.]",
    "'s3://b/run'": "quotes.* write s3://b/run[.]",
    "“s3://b/run”": "quotes.* write s3://b/run[.]",
    's3://b/run"': "quotes.* write s3://b/run$",
    '"/data/run"': "quotes.* write /data/run[.]",
    " s3://b/run": "blank.* write s3://b/run[.]",
    "s3://b/run ": "blank.* write s3://b/run$",
    "s3://b/run\n": "blank.* write s3://b/run$",
    "\ufeffruns/7": "blank.* write runs/7[.]",
    "  ": "blank",
    "runs\r\n7": "control character",
    "s3:b/run": "write s3://b/run[.]",
    "S3:b/run": "write s3://b/run[.]",
    "s3:/b/run": "write s3://b/run[.]",
    "s3//b/run": "write s3://b/run[.]",
    "s3 ://b/run": "write s3://b/run[.]",
    "s3: //b/run": "write s3://b/run[.]",
    "s3：//b/run": "write s3://b/run[.]",
    "gs:b/run": "write gs://b/run[.]",
    "--path=run": "option of a command line.* write run[.]",
    "-o": "option of a command line",
    "path: run": "line of YAML.* write run[.]",
    "Namespace(dir='x')": "object of Python",
    "N/A": "setting that is not there",
    "inf": "setting that is not there",
    "runs/None": "setting that is not there",
    "runs/nan/7": "setting that is not there",
    "run\u200b7": "control character",
    "memory:x": "write memory://x[.]",
    "shm:x": "write shm://x[.]",
    "file:run": "write run, or file:///absolute/path",
    "file:/tmp/run": "write file:///tmp/run[.]",
    "file://host/run": "three slashes",
    "://b/run": "write s3://",
    "simplecache::s3://b/run": "write s3://b/run[.]",
    "path=s3://b/run": "write s3://b/run[.]",
    "<s3://b/run>": "write s3://b/run[.]",
    "s3://a/s3://b/run": "two URLs.* write s3://b/run$",
    "/mnt/s3://b/run": "write s3://b/run[.].*file:///mnt/s3%3A//b/run",
    "/work/s3:/b/run": "write s3://b/run[.]",
    "arn:aws:s3:::b/run": "write s3://b/run[.]",
    "https://b.s3.eu-west-1.amazonaws.com/run?X-Amz-Signature=abcdef": "protocol: s3://b/run, or",
    "https://s3.amazonaws.com/b/run": "protocol: s3://b/run, or",
    "https://storage.googleapis.com/b/run": "protocol: gs://b/run, or",
    "https://me.blob.core.windows.net/c/run": "protocol: az://c/run, or",
    "dbfs:/run": "write dbfs://run",
    "host:/run": "write host://run.*sftp://host",
    "user@host:/run": "write sftp://user@host/run[.]",
    "user@host:run": "write sftp://user@host/run[.]",
    "C:\\runs": "path of Windows",
    "zip::/data/run.zip": "chain of file systems of fsspec.*write /data/run.zip",
    "C:/runs": "path of Windows",
    "\\\\server\\runs": "path of Windows",
    "file:///C:/runs": "path of Windows",
    "runs\\7": "write runs/7[.]",
    "my\\ run": "write my run[.]",
    "$CKPT_DIR/run": r"os.path.expandvars\('\$CKPT_DIR/run'\)",
    "${CKPT_DIR}/run": r"os.path.expandvars\('\${CKPT_DIR}/run'\)",
    "run-$SLURM_JOB_ID": "variable",
    "$(date)/run": "variable",
    "s3://b/$RUN": "variable",
    "${oc.env:HOME}/run": "resolve the configuration",
    "${now:%Y-%m-%d}": "resolve the configuration",
    "{{ ds }}/run": "resolve the configuration",
    "???": "resolve the configuration",
    "{save_dir}/run": r"write its value, as an f-string has it: f'{save_dir}/run'",
    "run-{step:08d}": "template",
    "{}/run": "template",
    "s3://{bucket}/run": "template",
    "%(save_dir)s/run": "template",
    "%s/run": "template",
    "s3://b/run-%d": "template",
    "run-%Y-%m-%d": "template",
    "%DIR%/run": "variable of Windows",
    "s3://<bucket>/run": "placeholder",
    "None": "a setting that is not there",
    "None/run": "a setting that is not there",
    "s3://None/run": "a setting that is not there",
    "nan": "a setting that is not there",
    "null": "a setting that is not there",
    "PosixPath('/runs/7')": "write /runs/7[.]",
    "['/near', '/far']": "write /near[.]",
    "b'/runs'": "write /runs[.]",
    "/work/~/run": "write ~/run[.]",
    "runs/*": "pattern",
    "~nobody-here/run": "no such user",
    "": "names no place",
    "a\0b": "NUL",
    "a\udc80b": "no UTF-8",
    "file:///a%FFb": "no UTF-8",
}
PLACES = {
    "runs/7": "runs/7",
    "run 7": "run 7",
    "run(1)": "run(1)",
    "gpt(lr=0.1)": "gpt(lr=0.1)",
    "lr=1e-3,wd=0": "lr=1e-3,wd=0",
    "run@7": "run@7",
    "me@here.org/a+b": "me@here.org/a+b",
    "ema@0.999:v2": "ema@0.999:v2",
    "run:7": "run:7",
    "2026-11-25T10:30/run": "2026-11-25T10:30/run",
    "ünïcode/実験：1": "ünïcode/実験：1",
    "it's [new] (copy) #1, 50%": "it's [new] (copy) #1, 50%",
    "my%20run%C3%A9": "my%20run%C3%A9",
    "s3/b/run": "s3/b/run",
    "~/run": f"{HOME}/run",
    "../run~": "../run~",
    "$5 and ~3": "$5 and ~3",
    "runs/none": "runs/none",
    "//data/run": "//data/run",
    "./$HOME/{x}": "./$HOME/{x}",
    "./s3:/b": "./s3:/b",
    "file:///a%20b/%24HOME": "/a b/$HOME",
    "s3://b/2026-11-25T10:30/run": "s3://b/2026-11-25T10:30/run",
    "s3://b/a%20b%20c": "s3://b/a%20b%20c",
    "hdfs://nn:8020/run?webhdfs=http://gate:9870": "hdfs://nn:8020/run?webhdfs=http://gate:9870",
    "memory://": "memory://",
}


@pytest.mark.parametrize(("text", "says"), SLIPS.items(), ids=[ascii(text) for text in SLIPS])
def test_a_slip_is_refused_with_what_was_likely_meant(
    text: str, says: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(aiockpt.UsageError, match=says):
        aiockpt.Checkpointer(text)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(("text", "means"), PLACES.items(), ids=[ascii(text) for text in PLACES])
def test_what_is_a_place_stays_what_it_is(text: str, means: str) -> None:
    assert parse_address(text).text == means


def test_a_path_object_and_a_dot_mean_it_literally_also_in_another_process() -> None:
    for text in (
        "'quoted'",
        "$HOME",
        "{x}",
        "%DIR%",
        "<run>",
        "None",
        "a*",
        " blank ",
        "my\\ run",
        "user@host:run",
        "C:/x",
    ):
        for given in (Path(text), f"./{text}"):
            address = parse_address(given)
            assert os.path.abspath(address.text) == os.path.abspath(text)
            assert parse_address(address.url) == Address("file", os.path.abspath(text))


def test_every_literal_spelling_that_is_offered_is_taken() -> None:
    for text in SLIPS:
        try:
            parse_address(text)
        except aiockpt.UsageError as error:
            offered = str(error).partition(" of that very name give ")[2]
            if offered:
                spelled = offered if offered.startswith("file:") else eval(offered)
                assert os.path.abspath(parse_address(spelled).text) == os.path.abspath(text)


def test_a_path_that_was_made_of_a_url_is_told_its_slash() -> None:
    for path in (Path("s3://b/run"), Path("/work", "s3://b").parent / "s3:" / "b" / "run", Path('"s3://b/run"')):
        with pytest.raises(aiockpt.UsageError, match="write s3://b/run"):
            parse_address(path)


def test_a_working_directory_that_is_no_utf8_is_named_and_an_absolute_place_is_taken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    here = tmp_path / os.fsdecode(b"x\xff")
    here.mkdir()
    monkeypatch.chdir(here)
    for text in ("run", Path("run"), "."):
        with pytest.raises(aiockpt.UsageError, match=r"x\\udcff.* is no UTF-8, in which places are written down"):
            aiockpt.Checkpointer(text)
    assert list(here.iterdir()) == []
    with aiockpt.Checkpointer(tmp_path / "run") as ckpt:
        ckpt.save(1, {"x": 1}).result()
        assert ckpt.latest().result() == 1


def test_every_call_decides_alike(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with aiockpt.Checkpointer(tmp_path / "run") as ckpt:
        ckpt.save(1, {"x": 1}).result()
        for call in (ckpt.copy(1, "$HERE/x"), ckpt.repair(1, source="$HERE/x")):
            with pytest.raises(aiockpt.UsageError, match="expandvars"):
                call.result()
    for tiers in (["run", "{far}"], [aiockpt.Tier("run"), aiockpt.Tier("{far}")]):
        with pytest.raises(aiockpt.UsageError, match="f-string"):
            aiockpt.Checkpointer(tiers)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["run"]
