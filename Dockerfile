# The whole image is one static binary: `make dist && docker build -t xpyd .`
# No base image is pulled; scratch is empty.
FROM scratch
COPY dist/xpyd /xpyd
ENV XPYD_DATA=/data
VOLUME /data
EXPOSE 8000 8001
ENTRYPOINT ["/xpyd"]
CMD ["--help"]
