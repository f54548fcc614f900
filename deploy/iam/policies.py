"""IAM policies with the least privileges that a specification needs. Pure.

Three parties: the execution role (SageMaker and the container), the deployer (runs `lmi deploy`), the invoker (sends
requests). `simulation.py` asks AWS whether they are in force.
"""

from __future__ import annotations

from deploy.iam.arns import Arns
from deploy.iam.statements import Policy, policy, statements
from deploy.iam.table import ADOPTING, TABLE
from deploy.resolve.decision import Decision
from deploy.spec import Spec


def policies(spec: Spec, decision: Decision, *, adopt: bool = False) -> dict[str, Policy]:
    """Return all policies by party, and the role's trust policy: SageMaker, for this account only.

    Args:
        adopt: the deployer takes over an endpoint of another owner, or puts a shadow beside it.
    """
    arns = Arns(spec, decision)
    trusted = {
        "Effect": "Allow",
        "Principal": {"Service": "sagemaker.amazonaws.com"},
        "Action": "sts:AssumeRole",
        "Condition": {"StringEquals": {"aws:SourceAccount": arns.account}},
    }
    rows = {**TABLE, "deployer": (*TABLE["deployer"], *ADOPTING)} if adopt else TABLE
    return {"trust": policy([trusted]), **{who: policy(statements(some, arns)) for who, some in rows.items()}}
