"""The table of scenarios: the question of each, its measurement, contenders, floors and sizes.

A contender is data: its name, and (``module:class``, arguments) of the object that saves and loads, or moves bytes.
`benchmarks.columns` has the formats of figures, `benchmarks.targets` their targets.
"""

from __future__ import annotations

from typing import Any

import msgspec

from benchmarks.pages import MIB

Spec = tuple[str, dict[str, Any]]
GIB = 1 << 30


class Scenario(msgspec.Struct, frozen=True, kw_only=True):
    """One question.

    Attributes:
        measure: ``module:function`` that carries out a turn.
        contenders: name → spec. A floor that saves like a contender is one, with "floor" in its name.
        floors: name → ``module:function`` that does nothing but move the same bytes.
        size_bytes: of the state, unless the command overrides it; 0 where the settings define the size.
        rounds: in each, every contender has one visit of *repetitions*.
        paired: contenders take turns and are compared within one process; else each has its own.
        always: contenders that a paired comparison needs.
        settings: those that ``--set`` may change; *smoke*: those of a smoke run.
        simulated: the machine is not measured, or one thread's processor time alone.
        needs: optional packages or programs.
    """

    name: str
    question: str
    measure: str
    contenders: dict[str, Spec]
    floors: dict[str, str] = {}
    size_bytes: int = GIB
    smoke_bytes: int = 16 * MIB
    rounds: int = 1
    repetitions: int = 3
    paired: bool = False
    always: tuple[str, ...] = ()
    settings: dict[str, Any] = {}
    smoke: dict[str, Any] = {}
    simulated: bool = False
    deadline_s: float = 900.0
    needs: str = ""


def _ours(**options: Any) -> Spec:
    return "contenders.ours:Aiockpt", options


def _dcp(kind: str, **options: Any) -> Spec:
    return f"contenders.dcp:{kind}", options


_LIBRARIES: dict[str, Spec] = {
    "aiockpt": _ours(),
    "dcp-save": _dcp("Save"),
    "dcp-save-4-threads": _dcp("Save", threads=4),
    "dcp-async-thread": _dcp("AsyncSave"),
    "dcp-async-thread-kept-stager": _dcp("AsyncSave", keep_stager=True),
    "dcp-async-process": _dcp("AsyncSave", process=True),
    "dcp-async-process-kept-stager": _dcp("AsyncSave", process=True, keep_stager=True),
    "torch-save": ("contenders.one_file:TorchSave", {}),
    "safetensors": ("contenders.one_file:Safetensors", {}),
}
_NOTHING: Spec = ("contenders.raw:Nothing", {})

_S3_CLIENTS: dict[str, Spec] = {
    "aiockpt": ("clients.ours:Aiockpt", {}),
    "aiockpt, retrying": ("clients.ours:Aiockpt", {"retrying": True}),
    "aiobotocore": ("clients.aiobotocore_client:Aiobotocore", {}),
    "boto3": ("clients.boto3_client:Boto3", {}),
    "obstore": ("clients.obstore_client:Obstore", {}),
    "obstore, unsigned payload": ("clients.obstore_client:Obstore", {"unsigned": True}),
    "s3torchconnector": ("clients.s3torch_client:S3Torch", {}),
    "floor: http.client": ("clients.http_client:HttpClient", {}),
}
_HDFS_CLIENTS: dict[str, Spec] = {
    **{name: _S3_CLIENTS[name] for name in ("aiockpt", "aiockpt, retrying")},
    "hdfs-native": ("clients.hdfs_client:HdfsNative", {}),
}


def _main(name: str, question: str, contenders: dict[str, Spec], floors: dict[str, str]) -> Scenario:
    return Scenario(
        name=name,
        question=question,
        measure=f"measure.saving:{name}",
        contenders=contenders,
        floors={name: f"contenders.floors:{function}" for name, function in floors.items()},
        rounds=5,
        needs="safetensors",
    )


def _clients(name: str, server: str, against: str, contenders: dict[str, Spec], needs: str) -> Scenario:
    return Scenario(
        name=name,
        question=f"What does a storage client cost, against {against}?",
        measure="measure.clients:clients",
        contenders=contenders,
        size_bytes=256 * MIB,
        rounds=3,
        repetitions=2,
        settings={"server": server, "part": 16 * MIB, "in_flight": 8, "small": 4096, "small_count": 200},
        smoke={"part": 8 * MIB, "small_count": 8},
        deadline_s=300.0,
        needs=needs,
    )


def _tensors(name: str, question: str) -> Scenario:
    return Scenario(
        name=name,
        question=question,
        measure=f"measure.calls:{name}",
        contenders={"aiockpt": _ours()},
        size_bytes=0,
        smoke_bytes=0,
        repetitions=100,
        settings={"tensors": (100, 1000, 10_000)},
        smoke={"tensors": (8, 40)},
    )


_COMPUTED: Any = {"size_bytes": 0, "smoke_bytes": 0, "repetitions": 1}
_CLIENT_LIBRARIES = "aiobotocore boto3 obstore s3torchconnector"
_ALL = (
    _main("memory", "How much memory beside the state?", _LIBRARIES, {}),
    _main(
        "save",
        "How long is training held, and when is the checkpoint safe?",
        _LIBRARIES,
        {"floor: memcpy": "memcpy", "floor: O_DIRECT write": "direct_write"},
    ),
    _main("warmed", "Is the first save as cheap, after `warm_up`?", {"aiockpt": _ours()}, {}),
    _main(
        "load",
        "How long until the job's own tensors are filled?",
        _LIBRARIES,
        {"floor: O_DIRECT read": "direct_read", "floor: warm preadv": "warm_read"},
    ),
    _main(
        "train",
        "What do saves take from a training loop of many small operations?",
        {"floor: memcpy + raw writer": ("contenders.raw:RawWriter", {"copies": True}), **_LIBRARIES},
        {},
    ),
    Scenario(
        name="ranks",
        question="What do saving and loading cost when several ranks do it together?",
        measure="measure.ranks:ranks",
        contenders={
            "aiockpt": ("measure.rank:Ours", {}),
            "dcp": ("measure.rank:DcpSave", {}),
            "dcp-async": ("measure.rank:DcpAsyncSave", {}),
            "floor": ("measure.rank:Floor", {}),
        },
        smoke_bytes=24 * MIB,
        rounds=2,
        settings={"load_ranks": (2, 4)},
        smoke={"load_ranks": (3,)},
        deadline_s=3600.0,
    ),
    Scenario(
        name="replicas",
        question="What does it save that ranks which want the same bytes read them once?",
        measure="measure.ranks:replicas",
        contenders=dict.fromkeys(("each alone", "load_group"), ("measure.rank:Ours", {})),
        smoke_bytes=24 * MIB,
        rounds=2,
        paired=True,
        settings={"storage_bytes_s": 0.4e9},
        deadline_s=3600.0,
    ),
    Scenario(
        name="peers",
        question="How long until a step is in the memory of its hosts, and of each other?",
        measure="measure.peers:peers",
        contenders={"aiockpt": _NOTHING, "floor: loopback": _NOTHING},
        size_bytes=512 * MIB,
        smoke_bytes=16 * MIB,
        rounds=2,
        repetitions=5,
        paired=True,
    ),
    Scenario(
        name="recovery",
        question="How long until a training that was killed, or hangs, does its next step?",
        measure="measure.recovery:recovery",
        contenders={"kill": _NOTHING, "hang": _NOTHING},
        size_bytes=MIB,
        smoke_bytes=MIB,
        repetitions=5,
    ),
    Scenario(
        name="effective_time",
        question="How much of the time does a job train that loses a process now and then?",
        measure="measure.effective_time:effective_time",
        contenders={"aiockpt": _NOTHING, "torch.save": _NOTHING, "DCP async": _NOTHING},
        size_bytes=256 * MIB,
        smoke_bytes=MIB,
        repetitions=3,
    ),
    Scenario(
        name="publishing",
        question="How fast is what changed in a step published, and applied on another host, beside the same by hand?",
        measure="measure.publishing:publishing",
        contenders=dict.fromkeys(("aiockpt", "floor: by hand", "floor: with sums", "floor: from disk"), _NOTHING),
        smoke_bytes=16 * MIB,
        rounds=2,
        paired=True,
        deadline_s=3600.0,
    ),
    Scenario(
        name="publishing_peaks",
        question="How much memory do publication and reception of a version take?",
        measure="measure.publishing:publishing_peaks",
        contenders=dict.fromkeys(("bfloat16", "float32"), _NOTHING),
        smoke_bytes=16 * MIB,
        paired=True,
        simulated=True,
        deadline_s=3600.0,
    ),
    Scenario(
        name="deltas",
        question="How many bytes has a published step, by the learning rate, beside the same by hand?",
        measure="measure.publishing_steps:deltas",
        contenders=dict.fromkeys(("1e-6", "3e-6", "1e-5", "3e-5", "2e-4"), _NOTHING),
        size_bytes=128 * MIB,
        smoke_bytes=2 * MIB,
        paired=True,
        settings={"batch": 8, "warm_steps": 40},
        smoke={"batch": 2, "warm_steps": 1},
        simulated=True,
        deadline_s=7200.0,
    ),
    Scenario(
        name="publishing_steps",
        question="What does it take from a training to publish its steps, beside only saving them?",
        measure="measure.publishing_steps:publishing_steps",
        contenders=dict.fromkeys(("saved", "published", "followed"), _NOTHING),
        size_bytes=256 * MIB,
        smoke_bytes=12 * MIB,
        repetitions=10,
        paired=True,
        always=("saved", "published", "followed"),
        settings={"batch": 256, "steps": 10},
        smoke={"batch": 4, "steps": 2},
        deadline_s=3600.0,
    ),
    Scenario(
        name="publishing_ranks",
        question="How much faster do three ranks publish than one, where each has the same rate to the place?",
        measure="measure.publishing_ranks:publishing_ranks",
        contenders=dict.fromkeys(("1 rank", "3 ranks"), _NOTHING),
        size_bytes=768 * MIB,
        smoke_bytes=3 * MIB,
        settings={"bytes_per_s": 50e6},
        smoke={"bytes_per_s": 1e9},
    ),
    Scenario(
        name="every",
        question="What does a checkpoint of every iteration cost a real training loop?",
        measure="measure.every:every",
        contenders={
            "none": _NOTHING,
            "aiockpt lazy": _ours(newest=True, snapshot="lazy"),
            "aiockpt lazy, process": _ours(newest=True, snapshot="lazy", worker="process"),
            "aiockpt eager": _ours(newest=True, snapshot="eager"),
            "dcp async": _dcp("AsyncSaveEveryStep"),
        },
        size_bytes=256 * MIB,
        smoke_bytes=12 * MIB,
        repetitions=5,
        paired=True,
        always=("none",),
        settings={"batch": 256, "steps": 10},
        smoke={"batch": 4, "steps": 2},
        deadline_s=3600.0,
    ),
    Scenario(
        name="beside",
        question="What does a lazy save take from forward and backward, beside a thread that only writes?",
        measure="measure.beside:beside",
        contenders={
            "none": _NOTHING,
            "raw writer": ("contenders.raw:RawWriter", {"copies": False}),
            "copying writer": ("contenders.raw:CopyingWriter", {}),
            "aiockpt lazy": _ours(newest=True, snapshot="lazy", immutable=True, worker="thread"),
            "aiockpt lazy, process": _ours(newest=True, snapshot="lazy", immutable=True, worker="process"),
        },
        size_bytes=512 * MIB,
        smoke_bytes=4 * MIB,
        repetitions=20,
        paired=True,
        always=("none", "raw writer"),
        deadline_s=3600.0,
    ),
    _tensors("calls", "How long does the call of a lazy save hold training, by the number of tensors?"),
    _tensors("watching", "What does it cost to see changes of what is copied later?"),
    Scenario(
        name="observing",
        question="What does it cost to watch a run, and to look at it?",
        measure="measure.observing:observing",
        contenders={"aiockpt": _ours()},
        size_bytes=64 * MIB,
        smoke_bytes=MIB,
        repetitions=200,
        settings={"ranks": 1000, "saves": 100, "seconds": 30.0},
        smoke={"ranks": 12, "saves": 3, "seconds": 1.0},
        needs="prometheus_client plotly Chromium",
    ),
    Scenario(
        name="promotion",
        question="What does copying a checkpoint to a farther tier take from training?",
        measure="measure.promotion:promotion",
        contenders={
            "none": ("none", {}),
            "folder": ("folder", {"keep": 1}),
            "folder, no limit": ("folder", {"keep": 1, "bandwidth": None}),
            "bucket": ("drain", {}),
            "bucket, no limit": ("drain", {"bandwidth": None}),
            "bucket, weights": ("drain", {"content": "weights"}),
            "SeaweedFS here": ("seaweed", {"keep": 1}),
        },
        size_bytes=512 * MIB,
        smoke_bytes=8 * MIB,
        repetitions=5,
        paired=True,
        settings={"quiet_s": 1.0, "settle_s": 1.0},
        smoke={"quiet_s": 0.1, "settle_s": 0.0},
        deadline_s=3600.0,
        needs="SeaweedFS",
    ),
    _clients("clients", "drain", "a server that only drains", _S3_CLIENTS, _CLIENT_LIBRARIES),
    _clients("clients-tls", "tls", "the same over TLS", _S3_CLIENTS, f"{_CLIENT_LIBRARIES} openssl"),
    _clients("clients-seaweed", "seaweed", "a real S3 on this machine", _S3_CLIENTS, f"{_CLIENT_LIBRARIES} SeaweedFS"),
    _clients("clients-hdfs", "hdfs", "a real HDFS on this machine", _HDFS_CLIENTS, "hdfs-native, Java"),
    Scenario(
        name="streaming",
        question="Is a checkpoint streamed to S3 and back, and in how much memory?",
        measure="measure.streaming:streaming",
        contenders={"aiockpt": _ours()},
        size_bytes=4 * GIB,
        smoke_bytes=64 * MIB,
        repetitions=1,
        settings={"pool": 256 * MIB, "url": ""},
        smoke={"pool": 32 * MIB},
        deadline_s=3600.0,
        needs="SeaweedFS",
    ),
    Scenario(
        name="peaks",
        question="How much memory do a save and a load take at their peak, and was that said before?",
        measure="measure.peaks:peaks",
        contenders=dict.fromkeys(
            (
                "save, eager",
                "save, lazy",
                "save, writer process",
                "save, a pool of 64 MiB",
                "load, in place",
                "load, half of all columns",
                "the same in reads of 1 MiB",
            ),
            _ours(),
        ),
        smoke_bytes=96 * MIB,
        repetitions=1,
        paired=True,
    ),
    Scenario(
        name="device",
        question="What does saving from a GPU take from training?",
        measure="measure.device:device",
        contenders={"aiockpt": _ours()},
        smoke_bytes=MIB,
        repetitions=5,
        settings={"twin": 0},
        smoke={"twin": 1},
        needs="a GPU",
    ),
    Scenario(
        name="planning",
        question="What does planning cost when there are many ranks?",
        measure="measure.planning:planning",
        contenders={"HSDP": ("HSDP", {}), "FSDP": ("FSDP", {})},
        **_COMPUTED,
        paired=True,
        settings={"ranks": (10, 100, 1000, 10_000), "tensors": 1000},
        smoke={"ranks": (2, 8), "tensors": 10},
        deadline_s=3600.0,
    ),
    Scenario(
        name="comparing",
        question="What does it cost that ranks compare what they have alike?",
        measure="measure.comparing:comparing",
        contenders=dict.fromkeys(("check", "first"), ("", {})),
        smoke_bytes=MIB,
        repetitions=25,
        paired=True,
        settings={"ranks": (2, 8), "tensors": 1172, "simulated_ranks": 64, "simulated_tensors": 1000},
        smoke={"ranks": (2,), "tensors": 20, "simulated_ranks": 4, "simulated_tensors": 10},
        deadline_s=1800.0,
    ),
    Scenario(
        name="gathering",
        question="How long do ten thousand ranks take from the last vote to the commit?",
        measure="measure.gathering:gathering",
        contenders=dict.fromkeys(("flat", "tree", "tree, 1 % of the gatherers die"), ("", {})),
        **_COMPUTED,
        paired=True,
        settings={"ranks": (10, 100, 1000, 10_000), "latency_ms": (5.0, 20.0, 50.0)},
        smoke={"ranks": (10, 300), "latency_ms": (20.0,)},
        simulated=True,
        deadline_s=7200.0,
    ),
    Scenario(
        name="exchanges",
        question="How long until all ranks know what to write at their first save?",
        measure="measure.gathering:exchanges",
        contenders={"aiockpt": _ours()},
        **_COMPUTED,
        settings={"ranks": (10, 100, 1000)},
        smoke={"ranks": (10, 50)},
        simulated=True,
    ),
    Scenario(
        name="cadence",
        question="Does `aiockpt.Cadence` save at the right moments?",
        measure="measure.cadence:cadence",
        contenders={"aiockpt": _ours()},
        **_COMPUTED,
        settings={"seeds": (1, 2, 3), "kinds": (), "hours": 0},
        smoke={"seeds": (1,), "kinds": ("many failures",), "hours": 2},
        simulated=True,
        deadline_s=3600.0,
    ),
)
SCENARIOS = {scenario.name: scenario for scenario in _ALL}
MAIN = ("memory", "save", "warmed", "load", "train")
"""Scenarios that run when none is named: the main comparison."""
