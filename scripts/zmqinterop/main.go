// Command zmqinterop is our side of scripts/zmq-interop: it talks to libzmq as the router talks to
// engines, and prints what it receives as JSON lines.
package main

import (
	"context"
	"encoding/json"
	"flag"
	"fmt"
	"log/slog"
	"os"
	"time"

	"github.com/xpyd/xpyd/internal/fleet"
	"github.com/xpyd/xpyd/internal/kvevents"
	"github.com/xpyd/xpyd/internal/trust"
	"github.com/xpyd/xpyd/internal/zmtp"
	"github.com/xpyd/xpyd/router/discover"
)

// teller prints what it receives.
type teller struct{ out *json.Encoder }

func (t teller) Apply(b *kvevents.Batch) { t.say("batch", b) }
func (t teller) Reset(reason string)     { t.say("reset", reason) }

func (t teller) AddStatic(i fleet.Instance, _ fleet.Source) error {
	t.say("added", i)
	return nil
}

func (t teller) Remove(id, reason string) bool {
	t.say("removed", id+": "+reason)
	return true
}

func (t teller) say(what string, v any) {
	if err := t.out.Encode(map[string]any{what: v}); err != nil {
		fmt.Fprintln(os.Stderr, err)
	}
}

func run(ctx context.Context) error {
	follow := flag.String("follow", "", "follow the publisher at host:port")
	replay := flag.String("replay", "", "its replay socket")
	publish := flag.Int("publish", 0, "publish this many batches, one every 50 ms")
	arrays := flag.Bool("arrays", false, "publish events as arrays")
	secret := flag.String("secret", "", "the fleet's secret, for CURVE")
	register := flag.Bool("register", false, "listen for P2pNccl registrations")
	flag.Parse()
	t := teller{json.NewEncoder(os.Stdout)}
	var ring *trust.Ring
	var keys func() (*zmtp.Keys, error)
	if *secret != "" {
		s, err := trust.ParseSecret(*secret)
		if err != nil {
			return err
		}
		if ring, err = trust.NewRing(s); err != nil {
			return err
		}
		keys = func() (*zmtp.Keys, error) { return kvevents.SubscriberKeys(ring, "") }
	}
	switch {
	case *follow != "":
		kvevents.NewFeed(kvevents.FeedConfig{Endpoint: *follow, Replay: *replay, Keys: keys, Handler: t}).Run(ctx)
	case *publish > 0:
		p, err := kvevents.Publish(kvevents.PublisherConfig{Listen: "127.0.0.1:0", Replay: "127.0.0.1:0", Topic: "kv-events", Arrays: *arrays, Ring: ring})
		if err != nil {
			return err
		}
		defer p.Close()
		t.say("listening", []string{p.Addr().String(), p.ReplayAddr().String()})
		tick := time.NewTicker(50 * time.Millisecond)
		defer tick.Stop()
		for n := range *publish {
			p.Send(&kvevents.Batch{Time: float64(n), Events: []kvevents.Event{
				{Hashes: []uint64{uint64(n), 1<<63 + uint64(n)}, Parent: 7, HasParent: n > 0, Tokens: []uint32{1, 2, 3, uint32(70000 + n)}, BlockSize: 2},
				{Kind: kvevents.Removed, Hashes: []uint64{uint64(n)}, Tier: kvevents.Host}, {Kind: kvevents.Cleared}}})
			select {
			case <-tick.C:
			case <-ctx.Done():
			}
		}
		<-ctx.Done()
	case *register:
		cfg := discover.DefaultConfig()
		cfg.P2PListen = "127.0.0.1:0"
		p, err := discover.ListenP2P(cfg, t, slog.New(slog.DiscardHandler))
		if err != nil {
			return err
		}
		defer p.Close()
		t.say("listening", p.Addr().String())
		<-ctx.Done()
	}
	return nil
}

func main() {
	ctx, cancel := context.WithTimeout(context.Background(), 20*time.Second)
	defer cancel()
	if err := run(ctx); err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
}
