# The server on a CPU, with the bundled model:
#   docker build -t kilolm . && docker run --init --stop-timeout 40 -p 127.0.0.1:8000:8000 kilolm
# or with another folder: add -v FOLDER:/model before kilolm, and --checkpoint /model after it.
# Without 127.0.0.1 the network can use it too: then add --api-key.
FROM python:3.11-slim
# --compile needs a C++ compiler
RUN apt-get update && apt-get install -y --no-install-recommends g++ && rm -rf /var/lib/apt/lists/*
WORKDIR /kilolm
RUN pip install --no-cache-dir "torch>=2.11,<2.14" --index-url https://download.pytorch.org/whl/cpu
COPY . .
RUN pip install --no-cache-dir -e ".[hf,structured]" && useradd --create-home kilolm
USER kilolm
EXPOSE 8000
ENTRYPOINT ["python", "server.py", "--host", "0.0.0.0"]
