//go:build linux

package main

import (
	"context"
	"log/slog"
	"net"
	"slices"
	"strings"
	"testing"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/xpyd/xpyd/kernels"
	"github.com/xpyd/xpyd/kernels/kerneltest"
	"github.com/xpyd/xpyd/kvconn"
	"github.com/xpyd/xpyd/kvconn/tcp"
	"github.com/xpyd/xpyd/kvconn/way"
	"github.com/xpyd/xpyd/kvlayout"
	"github.com/xpyd/xpyd/worker"
)

// gpuRanks is a backend of two ranks on GPUs: its pool moves to and from host memory and a link's, and
// peers open each rank's.
type gpuRanks struct {
	kernels.Backend
	kernels.Verifier
	ranks []*kerneltest.FakeGPU
}

func (g gpuRanks) RankPools() (list []kernels.RankPool) {
	for _, r := range g.ranks {
		list = append(list, r)
	}
	return list
}

func (gpuRanks) Info() kernels.Info      { return kernels.Info{Name: "cuda", Ranks: 2} }
func (gpuRanks) Blocks() int             { return 4 }
func (gpuRanks) Layout() kvlayout.Layout { return kvlayout.Plain(2, 2, 8, 16, "bf16") }

func (gpuRanks) RegisterHost([]byte) (kernels.HostMemory, error)         { panic("no session is opened") }
func (gpuRanks) GatherBlocks(*kernels.HostMove) (kernels.Pending, error) { panic("no block moves") }
func (gpuRanks) ScatterBlocks(*kernels.HostMove) (kernels.Pending, error) {
	panic("no block moves")
}
func (gpuRanks) NewLink() ([]byte, error) { panic("no session is opened") }
func (gpuRanks) OpenLink([]byte, kernels.LinkEnd, int64) (kernels.Link, error) {
	panic("no session is opened")
}

// dialed notes by which addresses sessions are opened.
type dialed []string

func (d *dialed) Open(_ context.Context, addr string, _ kvconn.PeerID) (*kvconn.Session, error) {
	*d = append(*d, addr)
	return nil, nil
}

// A worker of several ranks on GPUs reaches peers that offer every way from GPU to GPU, and those of
// other machines by NCCL. Where its device's pool cannot be opened it takes other ways.
func TestWaysOfRanks(t *testing.T) {
	kv := worker.KV{DeviceRefill: "on"}
	log := slog.New(slog.DiscardHandler)
	var backend gpuRanks
	open := func(setting string) (*way.Set, error) {
		return way.Open(ways(&tcp.Transport{}, &kv), setting, way.Pool{Backend: backend}, log)
	}
	ranks, err := kerneltest.NewFakeRanks(backend.Layout(), 2, 4)
	if err != nil {
		t.Fatal(err)
	}
	for _, g := range slices.Backward(ranks) {
		defer func() { g.Close() }()
	}
	if _, err := open("cudaipc"); err == nil || !strings.Contains(err.Error(), "cudaipc is not possible here: peers cannot open the pool") {
		t.Errorf("a pool that cannot be opened: %v", err)
	}
	backend.ranks = ranks
	set, err := open(way.Auto)
	if err != nil {
		t.Fatal(err)
	}
	lns, addrs, err := set.Offer("h:1")
	if err != nil {
		t.Fatal(err)
	}
	for _, ln := range lns {
		defer func(ln net.Listener) { ln.Close() }(ln)
	}
	if len(addrs) != 3 || !strings.HasPrefix(addrs["pinned"], "pinned:") || !strings.HasPrefix(addrs["cudaipc"], "cudaipc:") || addrs["nccl"] != "nccl:h:1" {
		t.Errorf("it offers %v, want cudaipc, nccl and pinned", addrs)
	}
	if shared := set.Shared(); shared == nil || shared.Ranks != 2 || len(shared.Layers) != 4 {
		t.Errorf("peers are told of the pool %+v", shared)
	}
	offers := map[string]string{"cudaipc": "cudaipc:x", "nccl": "nccl:h:2", "pinned": "pinned:x"}
	near := way.Peer{PeerID: kvconn.PeerID{ID: "near", Epoch: 1}, Machine: way.Machine(""), Addrs: offers}
	far := way.Peer{PeerID: kvconn.PeerID{ID: "far", Epoch: 1}, Machine: "elsewhere/1", Addrs: offers}
	var to dialed
	said := ""
	c, err := way.NewChooser(way.Config{Ways: set, Recv: &to, Machine: way.Machine(""), Log: log, Register: prometheus.NewPedanticRegistry(), Publish: func(s string) { said = s },
		Find: func(_ string, id kvconn.PeerID) way.Peer {
			if id.ID == "far" {
				return far
			}
			return near
		}})
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	for _, p := range []way.Peer{near, far} {
		if _, err := c.Open(t.Context(), "h:2", p.PeerID); err != nil {
			t.Fatal(err)
		}
	}
	if got := strings.Join(to, " "); got != "cudaipc:x nccl:h:2" {
		t.Errorf("it dials %s", got)
	}
	if want := "far nccl (cudaipc: on another machine), near cudaipc"; said != want {
		t.Errorf("it says %q, want %q", said, want)
	}
	if _, err := open("nccl"); err != nil {
		t.Errorf("nccl: %v", err)
	}
}
