# The whole image is one static binary: `make dist && docker build -t xpyd .`
# No base image is pulled; scratch is empty. For hf: models mount certificates,
# such as -v /etc/ssl/certs:/etc/ssl/certs:ro; /data keeps what was downloaded.
FROM scratch
COPY dist/xpyd /xpyd
ENV XPYD_DATA=/data/xpyd HOME=/data TMPDIR=/data
VOLUME /data
EXPOSE 8000 8001 8100 8200
ENTRYPOINT ["/xpyd"]
CMD ["--help"]
