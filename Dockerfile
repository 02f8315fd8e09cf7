# Serves the endpoint at port 8000. BAAR_KEY is the key that clients must send.
#
#   docker build -t baar . && docker run -p 8000:8000 -v baar:/work -e BAAR_KEY -e OPENAI_API_KEY baar
FROM python:3.12-slim
COPY . /source
RUN pip install --no-cache-dir /source && rm -r /source && useradd --create-home baar \
  && mkdir /work && chown baar /work
USER baar
WORKDIR /work
EXPOSE 8000
ENTRYPOINT ["baar", "--stage=serve", "--config.env.kind=recorded", "--config.models.kind=chat", \
  "--config.serve.host=0.0.0.0", "--config.serve.key_variable=BAAR_KEY"]
CMD ["--config.serve.policy=small"]
