# Beside main.tf.json, the output of `lmi deploy export --format terraform`: a policy for those who call the endpoint.

locals {
  stack    = split(":", aws_cloudformation_stack.endpoint.id) # arn:PARTITION:cloudformation:REGION:ACCOUNT:...
  endpoint = aws_cloudformation_stack.endpoint.outputs["EndpointName"]
}

resource "aws_iam_policy" "callers" {
  name_prefix = "lmi-callers-"
  policy = jsonencode({
    Version = "2012-10-17"
    Statement = [{
      Effect   = "Allow"
      Action   = ["sagemaker:InvokeEndpoint", "sagemaker:InvokeEndpointWithResponseStream"]
      Resource = "arn:${local.stack[1]}:sagemaker:${local.stack[3]}:${local.stack[4]}:endpoint/${lower(local.endpoint)}"
    }]
  })
}

output "callers_policy" {
  value = aws_iam_policy.callers.arn
}
