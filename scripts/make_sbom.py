"""List what is in an image, as a CycloneDX bill of materials.

Usage: python scripts/make_sbom.py [--out sbom] IMAGE ...

The image itself is asked: its Python for the distributions that are installed, with what each needs
and its licence, and its dpkg for Debian's packages. The same image gives the same bytes: the time
is that of the image, and the serial number is made from its digest. Needs docker, nothing else.
"""

import argparse
import json
import re
import subprocess
import sys
import uuid
from pathlib import Path
from typing import Any
from urllib.parse import quote

SPEC_VERSION = "1.5"
ASK = r"""
import json, re, sys
from importlib.metadata import distributions
found = {}
for each in distributions():
    data = each.metadata
    found[data["Name"]] = {
        "version": each.version,
        "license": data.get("License-Expression") or "",
        "classifiers": [one for one in data.get_all("Classifier") or () if "License ::" in one],
        "needs": [
            re.match(r"[\w.-]+", one)[0] for one in each.requires or () if "extra ==" not in one
        ],
    }
json.dump({"python": sys.version.split()[0], "distributions": found}, sys.stdout)
"""
DPKG = r"${Package}\t${Version}\t${Architecture}\n"


def output_of(*command: str) -> str:
    """Of a command that must end well."""
    return subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout


def asked(image: str, program: str, *arguments: str) -> str:
    """What a program of the image prints, in a container without a network that is gone then."""
    options = ("--rm", "--network", "none", "--entrypoint", program)
    return output_of("docker", "run", *options, image, *arguments)


def normal(name: str) -> str:
    """A distribution's name as package indexes write it."""
    return re.sub(r"[-_.]+", "-", name).lower()


def python_component(name: str, found: dict[str, Any]) -> dict[str, Any]:
    """A distribution as a component."""
    purl = f"pkg:pypi/{normal(name)}@{quote(found['version'], safe='')}"
    component = {
        "type": "library",
        "bom-ref": purl,
        "name": normal(name),
        "version": found["version"],
        "purl": purl,
    }
    if found["license"]:
        component["licenses"] = [{"expression": found["license"]}]
    elif found["classifiers"]:
        names = sorted({each.rpartition(" :: ")[2] for each in found["classifiers"]})
        component["licenses"] = [{"license": {"name": each}} for each in names]
    return component


def debian_component(line: str) -> dict[str, Any]:
    """A line of dpkg-query as a component."""
    name, version, architecture = line.split("\t")
    purl = f"pkg:deb/debian/{quote(name)}@{quote(version, safe='')}?arch={architecture}"
    return {"type": "library", "bom-ref": purl, "name": name, "version": version, "purl": purl}


def bill_of(image: str) -> dict[str, Any]:
    """The bill of materials of an image that is here."""
    (inspected,) = json.loads(output_of("docker", "image", "inspect", image))
    python = json.loads(asked(image, "python", "-c", ASK))
    distributions = {normal(name): each for name, each in python["distributions"].items()}
    libraries = {name: python_component(name, each) for name, each in distributions.items()}
    packages = [
        debian_component(line) for line in asked(image, "dpkg-query", "-W", "-f", DPKG).splitlines()
    ]
    digest = inspected["Id"]
    subject = {
        "type": "container",
        "bom-ref": "image",
        "name": image.rpartition(":")[0] or image,
        "version": digest,
        "properties": [{"name": "python", "value": python["python"]}],
    }
    depends = [
        {
            "ref": libraries[name]["bom-ref"],
            "dependsOn": sorted(
                {
                    libraries[normal(one)]["bom-ref"]
                    for one in each["needs"]
                    if normal(one) in libraries
                }
            ),
        }
        for name, each in sorted(distributions.items())
    ]
    return {
        "bomFormat": "CycloneDX",
        "specVersion": SPEC_VERSION,
        "serialNumber": f"urn:uuid:{uuid.uuid5(uuid.NAMESPACE_OID, digest)}",
        "version": 1,
        "metadata": {"timestamp": inspected["Created"], "component": subject},
        "components": sorted(
            [*libraries.values(), *packages], key=lambda component: str(component["bom-ref"])
        ),
        "dependencies": depends,
    }


def main() -> None:
    """Write one file per image."""
    parser = argparse.ArgumentParser(description="List what is in images, as CycloneDX.")
    parser.add_argument("images", nargs="+", metavar="IMAGE")
    parser.add_argument("--out", type=Path, default=Path("sbom"))
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    for image in options.images:
        try:
            bill = bill_of(image)
        except subprocess.CalledProcessError as error:
            sys.exit(f"sbom: {image}: {' '.join(error.cmd[:3])} failed")
        path = options.out / f"{re.sub(r'[^A-Za-z0-9.-]+', '-', image)}.cdx.json"
        path.write_text(json.dumps(bill, indent=2, sort_keys=True) + "\n")
        print(f"sbom: {path}: {len(bill['components'])} components")


if __name__ == "__main__":
    main()
