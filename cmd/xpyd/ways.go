package main

import (
	"github.com/xpyd/xpyd/internal/fleet"
	"github.com/xpyd/xpyd/kvconn"
	"github.com/xpyd/xpyd/kvconn/cudaipc"
	"github.com/xpyd/xpyd/kvconn/nccl"
	"github.com/xpyd/xpyd/kvconn/pinned"
	"github.com/xpyd/xpyd/kvconn/shm"
	"github.com/xpyd/xpyd/kvconn/tcp"
	"github.com/xpyd/xpyd/kvconn/way"
	"github.com/xpyd/xpyd/worker"
)

// ways are all transports for KV, fastest first. Which of them a worker uses depends on
// kv.transport, its device and its peers.
func ways(network kvconn.Transport, kv *worker.KV) []way.Kind {
	return []way.Kind{
		cudaipc.Way(kv.DeviceRefill == "on", kv.Sockets), // from GPU to GPU
		shm.Way(kv.Sockets),
		nccl.Way(network), // between GPUs that do not reach each other's memory
		pinned.Way(kv.Sockets),
		way.Network(network),
	}
}

// workerDefaults are a worker's default settings; kv.transport may be any of our ways.
func workerDefaults(role fleet.Role) worker.Config {
	cfg := worker.DefaultConfig(role)
	cfg.KV.Ways = way.Names(ways(&tcp.Transport{}, &cfg.KV))
	return cfg
}
