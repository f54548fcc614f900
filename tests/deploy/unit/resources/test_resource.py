from __future__ import annotations

from deploy.resources.resource import Ref, digest, refs, resolved, scoped_name, tag_map, tags, version_name


def test_values_take_their_places() -> None:
    ref = Ref("scaling-policy/a", "PolicyARN")
    request = {"AlarmActions": [ref, "x"], "Dimensions": ({"Value": ref},), "Period": 30}
    assert refs(request) == (ref, ref)
    assert resolved(request, lambda ref: f"arn:{ref.key}") == {
        "AlarmActions": ["arn:scaling-policy/a", "x"],
        "Dimensions": [{"Value": "arn:scaling-policy/a"}],
        "Period": 30,
    }
    assert refs({"Period": 30}) == ()


def test_a_version_is_found_again_by_its_content_alone() -> None:
    name = version_name("llama", {"a": 1, "b": [2]})
    assert name == version_name("llama", {"b": [2], "a": 1}) == f"llama-{digest({'a': 1, 'b': [2]})}"
    assert name != version_name("llama", {"a": 1, "b": [3]})
    assert len(version_name("x" * 63, {})) == 63


def test_no_two_deployments_share_a_name_beside_them() -> None:
    assert scoped_name("a", "b", "5xx") == "a/b/5xx" != scoped_name("a-b", "5xx")


def test_tags_in_both_forms() -> None:
    marks = tags("llama", "1234", {"team": "search"})
    assert tag_map(marks) == {"team": "search", "lmi:deployment": "llama", "lmi:spec": "1234"}
