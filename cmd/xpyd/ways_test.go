package main

import (
	"context"
	"log/slog"
	"net"
	"strings"
	"testing"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/xpyd/xpyd/kernels"
	"github.com/xpyd/xpyd/kvconn"
	"github.com/xpyd/xpyd/kvconn/tcp"
	"github.com/xpyd/xpyd/kvconn/way"
	"github.com/xpyd/xpyd/kvlayout"
	"github.com/xpyd/xpyd/worker"
)

// gpuRanks is a backend of two ranks on GPUs: its pool moves to and from host memory, and no more.
type gpuRanks struct {
	kernels.Backend
	kernels.Verifier
}

func (gpuRanks) Info() kernels.Info      { return kernels.Info{Name: "cuda", Ranks: 2} }
func (gpuRanks) Blocks() int             { return 4 }
func (gpuRanks) Layout() kvlayout.Layout { return kvlayout.Plain(2, 2, 8, 16, "bf16") }

func (gpuRanks) RegisterHost([]byte) (kernels.HostMemory, error)         { panic("no session is opened") }
func (gpuRanks) GatherBlocks(*kernels.HostMove) (kernels.Pending, error) { panic("no block moves") }
func (gpuRanks) ScatterBlocks(*kernels.HostMove) (kernels.Pending, error) {
	panic("no block moves")
}

// dialed notes by which addresses sessions are opened.
type dialed []string

func (d *dialed) Open(_ context.Context, addr string, _ kvconn.PeerID) (*kvconn.Session, error) {
	*d = append(*d, addr)
	return nil, nil
}

// A worker of several ranks on GPUs reaches peers that offer every way through pinned host memory,
// and those of other machines over the network; it says why not from GPU to GPU.
func TestWaysOfRanks(t *testing.T) {
	kv := worker.KV{DeviceRefill: "on"}
	log := slog.New(slog.DiscardHandler)
	open := func(setting string) (*way.Set, error) {
		return way.Open(ways(&tcp.Transport{}, &kv), setting, way.Pool{Backend: gpuRanks{}}, log)
	}
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
	if len(addrs) != 1 || !strings.HasPrefix(addrs["pinned"], "pinned:") {
		t.Errorf("it offers %v, want pinned alone", addrs)
	}
	if shared := set.Shared(); shared == nil {
		t.Error("peers are not told where its pool is")
	}
	offers := map[string]string{"cudaipc": "cudaipc:x", "nccl": "nccl:h:2", "pinned": "pinned:x"}
	near := way.Peer{PeerID: kvconn.PeerID{ID: "near", Epoch: 1}, Machine: way.Machine(), Addrs: offers}
	far := way.Peer{PeerID: kvconn.PeerID{ID: "far", Epoch: 1}, Machine: "elsewhere/1", Addrs: offers}
	var to dialed
	said := ""
	c, err := way.NewChooser(way.Config{Ways: set, Recv: &to, Log: log, Register: prometheus.NewPedanticRegistry(), Publish: func(s string) { said = s },
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
	if got := strings.Join(to, " "); got != "pinned:x h:2" {
		t.Errorf("it dials %s", got)
	}
	const why = "cudaipc: the pool is in the memory of 2 ranks; nccl: the pool is in the memory of 2 ranks"
	if want := "far tcp (" + why + "; pinned: on another machine), near pinned (" + why + ")"; said != want {
		t.Errorf("it says %q, want %q", said, want)
	}
	for _, name := range []string{"cudaipc", "nccl"} {
		if _, err := open(name); err == nil || err.Error() != name+" is not possible here: the pool is in the memory of 2 ranks" {
			t.Errorf("%s: %v", name, err)
		}
	}
}
