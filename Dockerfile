# docker build -t optrush .
# docker run --rm --gpus all --ipc host -v "$PWD:/work" optrush train run.yaml
FROM python:3.12-slim
# torch.compile and triton call a compiler
RUN apt-get update && apt-get install -y --no-install-recommends g++ git && rm -rf /var/lib/apt/lists/*
WORKDIR /src
COPY pyproject.toml constraints.txt README.md ./
COPY src src
RUN pip install --no-cache-dir -c constraints.txt .
WORKDIR /work
ENTRYPOINT ["optrush"]
