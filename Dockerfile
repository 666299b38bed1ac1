# Images of xpyd. The host needs Docker with BuildKit, and nothing else:
#
#   docker build -t xpyd .                        for CPUs and routers: one static binary and CA certificates
#   docker build --target cuda -t xpyd:cuda .     for NVIDIA GPUs: also libxpyd_cuda.so, cuBLASLt and NCCL
#
# VERSION is what `xpyd version` says: --build-arg VERSION="$(git describe --always --dirty)". In both images the
# user is 65532, and /data (what a router keeps), /fleet, /models (what is downloaded) and /run/xpyd
# (sockets of containers that share memory, kv.sockets) are its own.
ARG GO=golang:1.26
ARG CUDA=13.0.2
ARG CUDA_DISTRIBUTION=ubuntu24.04

FROM --platform=$BUILDPLATFORM ${GO} AS source
WORKDIR /src
COPY go.mod go.sum ./
RUN --mount=type=cache,target=/go/pkg/mod go mod download
COPY . .

FROM source AS static
ARG VERSION=
ARG TARGETARCH
RUN --mount=type=cache,target=/go/pkg/mod --mount=type=cache,target=/root/.cache/go-build \
    CGO_ENABLED=0 GOARCH=$TARGETARCH go build -trimpath -buildvcs=false -ldflags "-s -w -X main.stamped=$VERSION" -o /out/xpyd ./cmd/xpyd
RUN mkdir -p /folders/run && chmod 755 /folders /folders/run && mkdir -m 700 /folders/data /folders/fleet /folders/models /folders/run/xpyd

FROM nvidia/cuda:${CUDA}-devel-${CUDA_DISTRIBUTION} AS library
COPY --from=source /usr/local/go /usr/local/go
COPY --from=source /src /src
WORKDIR /src
ARG VERSION=
RUN scripts/build-cuda /out/libxpyd_cuda.so && \
    cp -L /usr/local/cuda/lib64/libcublasLt.so.13 /usr/lib/*-linux-gnu/libnccl.so.2 /out/
COPY --from=source /etc/ssl/certs/ca-certificates.crt /etc/ssl/certs/
RUN --mount=type=cache,target=/go/pkg/mod --mount=type=cache,target=/root/.cache/go-build \
    GOPATH=/go CGO_ENABLED=1 /usr/local/go/bin/go build -trimpath -buildvcs=false -ldflags "-s -w -X main.stamped=$VERSION" -o /out/xpyd ./cmd/xpyd

FROM nvidia/cuda:${CUDA}-base-${CUDA_DISTRIBUTION} AS cuda
COPY --from=source /etc/ssl/certs/ca-certificates.crt /etc/ssl/certs/
COPY --from=static --chown=65532:65532 /folders/ /
COPY --from=library /out/ /usr/local/bin/
ENV XPYD_DATA=/data/xpyd HF_HOME=/models HOME=/data
USER 65532:65532
EXPOSE 8000 8001 8100 8200
ENTRYPOINT ["/usr/local/bin/xpyd"]
CMD ["--help"]

FROM scratch AS cpu
COPY --from=source /etc/ssl/certs/ca-certificates.crt /etc/ssl/certs/
COPY --from=static --chown=65532:65532 /folders/ /
COPY --from=static /out/xpyd /usr/local/bin/xpyd
ENV XPYD_DATA=/data/xpyd HF_HOME=/models HOME=/data TMPDIR=/data
USER 65532:65532
EXPOSE 8000 8001 8100 8200
ENTRYPOINT ["/usr/local/bin/xpyd"]
CMD ["--help"]
