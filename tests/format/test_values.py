"""The plain values of all ranks become one tree: union where they differ in what they have, equal where they overlap."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aiockpt.format.merge import unite

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=3),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(["$", "a", "b", "items"]), inner, max_size=3)
    ),
    max_leaves=12,
)


def optimizer(groups: list[list[str]], keys: list[str], lr: Any = 0.1, **more: Any) -> dict[str, Any]:
    names = [name for group in groups for name in group]
    return {
        "$": "optimizer",
        "groups": [{"params": group, "values": {"lr": lr}} for group in groups],
        "state": [{"keys": keys, "params": list(range(len(names)))}],
        "values": [[name, "step", 3] for name in names],
        **more,
    }


def conflicts(*trees: Any) -> list[str]:
    return [str(conflict) for conflict in unite(list(enumerate(trees)))[1]]


def test_equal_trees_are_united_to_themselves() -> None:
    tree = {"a": [1, {"b": None}], "o": optimizer([["w"], ["b"]], ["exp_avg"])}
    assert unite([(0, tree), (1, tree), (2, tree)]) == (tree, [])


@given(JSON, JSON)
def test_any_two_trees_are_united_or_named(one: Any, other: Any) -> None:
    tree, found = unite([(3, one), (7, other)])
    assert all((conflict.first, conflict.other) == (3, 7) for conflict in found)
    if one == other:
        assert not found or repr(one) != repr(other)
    assert unite([(0, one), (1, one)])[1] == []
    assert tree is not None or one is None or other is None or found


def test_stages_of_a_pipeline_have_keys_of_their_own() -> None:
    tree, found = unite([(0, {"s": {"a": 1}, "n": 5}), (1, {"s": {"b": 2}, "n": 5}), (2, {"s": {"a": 1, "c": 3}})])
    assert (tree, found) == ({"s": {"a": 1, "b": 2, "c": 3}, "n": 5}, [])


def test_experts_in_a_dict_of_numbers_are_united_by_number() -> None:
    trees: list[Any] = [{"$": "dict", "items": [[rank, f"expert {rank}"], [9, "shared"]]} for rank in range(2)]
    assert unite(list(enumerate(trees)))[0] == {
        "$": "dict",
        "items": [[0, "expert 0"], [9, "shared"], [1, "expert 1"]],
    }
    trees[1]["items"][1][1] = "other"
    assert conflicts(*trees) == ["[9] ('shared' on rank 0, 'other' on rank 1)"]


def test_what_ranks_say_differently_in_the_metadata_of_a_dict_is_what_the_first_one_says() -> None:
    def node(device: str, key: str) -> dict[str, Any]:
        return {"$": "OrderedDict", "items": [["x", 1]], "metadata": {"": {"device": device}, key: {"version": 2}}}

    united = {"": {"device": "cuda:0"}, "a": {"version": 2}, "b": {"version": 2}}
    assert unite([(0, node("cuda:0", "a")), (1, node("cuda:1", "b"))]) == (
        {**node("cuda:0", "a"), "metadata": united},
        [],
    )


def test_a_module_without_values_leaves_those_of_another_rank() -> None:
    assert unite([(0, {"$": "module"}), (1, {"$": "module", "values": {"x": 1}})]) == (
        {"$": "module", "values": {"x": 1}},
        [],
    )


def test_optimizers_are_united_by_parameter_names_group_by_group() -> None:
    ours = optimizer([["s0.w", "shared"], ["s0.b"]], ["exp_avg"])
    theirs = optimizer([["s1.w", "shared"], ["s1.b"]], ["exp_avg"], rest={"extra": 1})
    tree, found = unite([(0, ours), (1, theirs)])
    assert found == []
    assert [group["params"] for group in tree["groups"]] == [["s0.w", "shared", "s1.w"], ["s0.b", "s1.b"]]
    assert tree["state"] == [{"keys": ["exp_avg"], "params": [0, 1, 2, 3, 4]}]
    assert sorted(tree["values"]) == [[name, "step", 3] for name in ["s0.b", "s0.w", "s1.b", "s1.w", "shared"]]
    assert tree["rest"] == {"extra": 1}


def test_state_that_only_one_rank_has_made_keeps_its_parameter() -> None:
    ours, theirs = optimizer([["a"]], ["exp_avg"]), optimizer([["b"]], ["momentum"])
    theirs["state"], theirs["values"] = [], []
    tree, _ = unite([(0, ours), (1, theirs)])
    assert (tree["groups"][0]["params"], tree["state"]) == (["a", "b"], [{"keys": ["exp_avg"], "params": [0]}])


@pytest.mark.parametrize(
    ("theirs", "message"),
    [
        (optimizer([["w"]], ["exp_avg"], lr=0.2), "o: lr of w (0.1 on rank 0, 0.2 on rank 1)"),
        (optimizer([["w"]], ["exp_avg"], lr=1), "o: lr of w (0.1 on rank 0, 1 on rank 1)"),
        (optimizer([["w"]], ["exp_avg"], **{"class": "SGD"}), "o.class ('AdamW' on rank 0, 'SGD' on rank 1)"),
        ({**optimizer([["w"]], []), "values": [["w", "step", 4]]}, "o.state.w.step (3 on rank 0, 4 on rank 1)"),
    ],
)
def test_optimizers_that_contradict_each_other_are_named(theirs: dict[str, Any], message: str) -> None:
    ours = optimizer([["w"]], ["exp_avg"], **{"class": "AdamW"})
    assert conflicts({"o": ours}, {"o": theirs}) == [message]


def groups_of(*optimizers: Any) -> list[tuple[list[str], Any]]:
    tree, found = unite(list(enumerate(optimizers)))
    assert found == []
    return [(group["params"], group["values"]["lr"]) for group in tree["groups"]]


def test_what_a_group_says_belongs_to_its_parameters_where_ranks_have_other_groups() -> None:
    fast, slow = optimizer([["a"], ["b"]], []), optimizer([["c"]], [], lr=0.5)
    assert groups_of(fast, slow) == [(["a", "b"], 0.1), (["c"], 0.5)]
    assert groups_of(slow, fast) == [(["c"], 0.5), (["a", "b"], 0.1)]
    assert groups_of(fast, optimizer([["b", "c"]], [])) == [(["a", "b", "c"], 0.1)]
    assert groups_of(optimizer([["w"], ["b"]], []), optimizer([["b"], ["w"]], [])) == [(["w", "b"], 0.1)]
    assert groups_of(fast, optimizer([["c"], []], [])) == [(["a", "c"], 0.1), (["b"], 0.1)]


def test_a_value_of_a_group_that_only_one_rank_has_is_for_all() -> None:
    theirs = optimizer([["w"]], [])
    theirs["groups"][0]["values"]["initial_lr"] = 3
    tree, found = unite([(0, optimizer([["w"]], [])), (1, theirs)])
    assert (found, tree["groups"][0]["values"]) == ([], {"lr": 0.1, "initial_lr": 3})


def test_state_follows_its_parameter_into_the_united_groups() -> None:
    ours, theirs = optimizer([["a"], ["b"]], ["exp_avg"]), optimizer([["c"]], ["momentum"], lr=0.5)
    tree, _ = unite([(0, theirs), (1, ours)])
    assert [group["params"] for group in tree["groups"]] == [["c"], ["a", "b"]]
    assert tree["state"] == [{"keys": ["momentum"], "params": [0]}, {"keys": ["exp_avg"], "params": [1, 2]}]


@pytest.mark.parametrize(
    ("ours", "theirs"),
    [(1, True), (1, 1.0), ([1], [1, 2]), ({"a": 1}, [1]), ({"$": "set", "items": []}, {"$": "tuple", "items": []}),
     ({"$": "optimizer", "groups": 1}, {"$": "optimizer", "rows": 1})],
)  # fmt: skip
def test_what_differs_in_type_or_form_is_a_conflict(ours: Any, theirs: Any) -> None:
    assert len(unite([(0, ours), (1, ours), (2, theirs)])[1]) == 1
