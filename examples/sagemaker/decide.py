"""The probabilities of an endpoint's decisions, without generated text: ENDPOINT_NAME=... python decide.py"""

import json
import os

import boto3
from botocore.config import Config

config = Config(read_timeout=70, retries={"total_max_attempts": 1})
runtime = boto3.client("sagemaker-runtime", config=config)

body = {
    "state": "My last invoice has a line that I did not order. Please send the money back today.",
    "questions": {
        "refund": {"type": "noul", "instructions": "Does the customer want money back?"},
        "team": {
            "type": "choice",
            "instructions": "Which team should answer?",
            "criteria": {"billing": "invoices and refunds", "technical": "errors and outages"},
        },
        "urgency": {
            "type": "score",
            "instructions": "How soon does the customer need an answer?",
            "criteria": ["whenever there is time", "this week", "today"],
        },
    },
}
response = runtime.invoke_endpoint(
    EndpointName=os.environ["ENDPOINT_NAME"], ContentType="application/json", Body=json.dumps(body)
)
answers = json.load(response["Body"])["answers"]
print(f"refund: {answers['refund']['noul']:.2f}")
print(f"team: {answers['team']['choice']} ({answers['team']['probabilities'][answers['team']['choice']]:.2f})")
print(f"urgency: {answers['urgency']['score']:.1f} of 2")
