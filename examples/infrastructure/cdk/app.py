"""A CDK app with the resources that `lmi deploy export` writes, and a policy for those who call the endpoint.

    lmi deploy export examples/smollm2-cpu.yaml --format cloudformation-json --output endpoint.json
    cdk deploy --app "python examples/infrastructure/cdk/app.py endpoint.json"

Needs: pip install aws-cdk-lib, and Node
"""

from __future__ import annotations

import argparse

from aws_cdk import App, Stack
from aws_cdk.aws_iam import ManagedPolicy, PolicyStatement
from aws_cdk.cloudformation_include import CfnInclude


class Endpoint(Stack):
    """The resources of a template as constructs, each under its name there."""

    def __init__(self, app: App, name: str, template: str) -> None:
        super().__init__(app, name)
        resources = CfnInclude(self, "Resources", template_file=template)
        call = PolicyStatement(
            actions=["sagemaker:InvokeEndpoint", "sagemaker:InvokeEndpointWithResponseStream"],
            resources=[resources.get_resource("Endpoint").ref],
        )
        ManagedPolicy(self, "Callers", statements=[call])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("template", help="a file of lmi deploy export --format cloudformation-json")
    parser.add_argument("--stack", default="lmi-endpoint", help="the stack's name (default: %(default)s)")
    arguments = parser.parse_args()
    app = App()
    Endpoint(app, arguments.stack, arguments.template)
    app.synth()


if __name__ == "__main__":
    main()
