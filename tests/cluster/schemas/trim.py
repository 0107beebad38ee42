"""Cut the published schemas of Kubeflow down to the fields that our manifests use.

    python tests/cluster/schemas/trim.py CRD.yaml ... < the manifests

Of the fields that they use all is kept that a schema says, so these are checked as a cluster does;
any other field, whether left out here or unknown there, is refused. The CRDs, Apache License 2.0:

    github.com/kubeflow/trainer v2.3.0 (658725bdae5c7e3a0854d93ac6ff492e109a22ab)
        manifests/base/crds/trainer.kubeflow.org_trainingruntimes.yaml
        manifests/base/crds/trainer.kubeflow.org_trainjobs.yaml
    github.com/kubeflow/trainer v1.9.4 (4445c12aa62e4345b0c2c6ac9b215a70eca46ed7)
        manifests/base/crds/kubeflow.org_pytorchjobs.yaml
"""

import json
import sys
from pathlib import Path
from typing import Any

import yaml

DROPPED = {"description", "format", "default"}  # the rules in CEL (x-kubernetes-…) are, too


def trim(schema: dict[str, Any], values: list[Any]) -> dict[str, Any]:
    """What a schema says about these values."""
    result = {k: v for k, v in schema.items() if k not in DROPPED and not k.startswith("x-")}
    if "properties" in schema:
        used = {name for value in values for name in value}
        result["properties"] = {
            name: trim(inner, [value[name] for value in values if name in value])
            for name, inner in schema["properties"].items()
            if name in used
        }
        result["additionalProperties"] = False
    elif isinstance(inner := schema.get("additionalProperties"), dict):
        inside = [item for value in values for item in value.values()]
        result["additionalProperties"] = trim(inner, inside)
    elif "items" in schema:
        result["items"] = trim(schema["items"], [item for value in values for item in value])
    return result


def main() -> None:
    """Write one JSON file for each kind."""
    manifests = [m for m in yaml.safe_load_all(sys.stdin) if m]
    for path in map(Path, sys.argv[1:]):
        crd = yaml.safe_load(path.read_text("utf-8"))["spec"]
        (version,) = crd["versions"]
        named = {"apiVersion": f"{crd['group']}/{version['name']}", "kind": crd["names"]["kind"]}
        found = [manifest for manifest in manifests if named.items() <= manifest.items()]
        schema = trim(version["schema"]["openAPIV3Schema"], found)
        schema["properties"] |= {name: {"const": value} for name, value in named.items()}
        schema["$comment"] = f"from {path.name} by trim.py, which names its source and licence"
        text = json.dumps(schema, indent=1, sort_keys=True) + "\n"
        (Path(__file__).parent / f"{named['kind']}.json").write_text(text, "utf-8")


if __name__ == "__main__":
    main()
