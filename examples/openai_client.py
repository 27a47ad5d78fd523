"""The official openai client, with a server on this machine.

pip install openai
st2i serve --model gpt-image-1=shapes
python examples/openai_client.py http://127.0.0.1:8000/v1 [OUT.png]
"""

import base64
import os
import sys

from openai import OpenAI

url = sys.argv[1] if len(sys.argv) > 1 else "http://127.0.0.1:8000/v1"
out = sys.argv[2] if len(sys.argv) > 2 else "ring.png"

# The key says which tenant is charged; a server without keys takes any.
client = OpenAI(base_url=url, api_key=os.environ.get("OPENAI_API_KEY", "none"))

made = client.images.generate(
    model="gpt-image-1",
    prompt="a large red ring on a green background",
    extra_body={"seed": 7},  # what OpenAI's API does not have
)
image = made.data[0]
with open(out, "wb") as file:
    file.write(base64.b64decode(image.b64_json))
print(f"{out}: {made.size}, seed {image.seed}")
