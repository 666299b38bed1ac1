package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"github.com/xpyd/xpyd/internal/fleet"
	"github.com/xpyd/xpyd/internal/trust"
	"github.com/xpyd/xpyd/scripts/bench/harness"
)

// fleetAt is a router's admin listener, and the secret of its workers.
type fleetAt struct {
	admin, token string
	secret       trust.Secret
}

// read reads them from a router's data folder.
func (f *fleetAt) read(data string) error {
	var join string
	for name, to := range map[string]*string{"join-url": &join, "admin-url": &f.admin, "admin-token": &f.token} {
		text, err := os.ReadFile(filepath.Join(data, name))
		if *to = strings.TrimSpace(string(text)); err != nil {
			return err
		}
	}
	joined, err := trust.ParseJoin(join)
	if err == nil {
		f.secret = joined.Secrets[0]
	}
	return err
}

// peerSite is two workers and a router, which is there for its NATS.
type peerSite struct {
	fleetAt
	o            *peer
	procs        []*harness.Process
	giver, taker *fleet.Member
	exact        bool // batch_invariant: tokens must be equal
}

// patience bounds each wait: for a model to load, and for a fetch on a starved machine.
const patience = 3 * time.Minute

// startSite starts the processes; close also ends those of a failed start.
func (o *peer) startSite(ctx context.Context, invariant bool) (*peerSite, error) {
	s := &peerSite{o: o, exact: invariant}
	data, config := filepath.Join(o.Dir, "data"), filepath.Join(o.Dir, "router.yaml")
	if err := errors.Join(os.RemoveAll(data), os.WriteFile(config, []byte("fleet: {listen: \"127.0.0.1:0\"}\n"), 0o600)); err != nil {
		return s, err
	}
	if err := s.startProcess("router", nil, "router", "--config", config, "--listen", "127.0.0.1:0", "--admin", "127.0.0.1:0", "--data", data); err != nil {
		return s, err
	}
	join := filepath.Join(data, "join-url")
	if err := s.until(ctx, func() error { return s.read(data) }); err != nil {
		return s, err
	}
	for i, id := range []string{"giver", "taker"} {
		args := []string{"prefill", "--id", id, "--join-file", join, "--kv-load-timeout", patience.String()}
		env := []string{"XPYD_KV__PEER_SILENCE=" + patience.String(), "XPYD_KV__DIAL_TIMEOUT=" + patience.String(), "XPYD_KV__HANDSHAKE_TIMEOUT=" + patience.String()}
		for _, e := range os.Environ() {
			if strings.HasPrefix(e, "XPYD_KV__") { // a router knows no such settings
				env = append(env, e)
			}
		}
		if o.model != "" {
			args = append(args, "--model", o.model)
		}
		if len(o.gpus) > 0 {
			args = append(args, "--device", "cuda", "--kv-memory", "32GiB", fmt.Sprintf("--batch-invariant=%t", invariant))
			env = append(env, "CUDA_VISIBLE_DEVICES="+o.gpus[i], "XPYD_CUDA_LIB="+o.library)
		} else {
			args = append(args, "--device", "cpu", "--threads", "1")
		}
		if err := s.startProcess(id, env, args...); err != nil {
			return s, err
		}
	}
	return s, s.until(ctx, func() (err error) {
		if s.giver, err = s.member(ctx, "giver"); err == nil {
			s.taker, err = s.member(ctx, "taker")
		}
		return err
	})
}

func (s *peerSite) startProcess(name string, env []string, args ...string) error {
	p, err := s.o.Bench.Start(harness.Spec{Name: name, Argv: append([]string{s.o.XPYD}, args...), Env: append(plainEnv(), env...)})
	if err == nil {
		s.procs = append(s.procs, p)
	}
	return err
}

// close ends the processes, the router last.
func (s *peerSite) close() {
	for _, p := range slices.Backward(s.procs) {
		_ = p.Stop() // the figures are taken
	}
}

// until retries f for as long as patience lasts and all processes run.
func (s *peerSite) until(ctx context.Context, f func() error) error {
	return harness.Until(ctx, patience, f, s.procs...)
}

func (f *fleetAt) member(ctx context.Context, id string) (*fleet.Member, error) {
	var all struct{ Instances []fleet.Member }
	if err := call(ctx, http.MethodGet, f.admin+"/admin/v1/instances", f.bearer(), "", func(r io.Reader, _ http.Header) error {
		return json.NewDecoder(r).Decode(&all)
	}); err != nil {
		return nil, err
	}
	for i := range all.Instances {
		if m := &all.Instances[i]; m.ID == id && m.State == fleet.Live {
			return m, nil
		}
	}
	return nil, fmt.Errorf("%s is not live", id)
}

func (f *fleetAt) bearer() http.Header { return http.Header{"Authorization": {"Bearer " + f.token}} }

// post sends JSON to worker m, with the fleet's token for it.
func (f *fleetAt) post(ctx context.Context, m *fleet.Member, path, peer, body string, read func(io.Reader, http.Header) error) error {
	h := http.Header{"Content-Type": {"application/json"}}
	h.Set(trust.Header, f.secret.Token(trust.HTTP, trust.Member(m.ID, m.Epoch)))
	if peer != "" {
		h.Set("X-Xpyd-Kv-Peer", peer)
	}
	return call(ctx, http.MethodPost, m.URL+path, h, body, read)
}

// call sends a request and reads the reply, whose status must be 200.
func call(ctx context.Context, method, url string, header http.Header, body string, read func(io.Reader, http.Header) error) error {
	req, err := http.NewRequestWithContext(ctx, method, url, strings.NewReader(body))
	if err != nil {
		return err
	}
	if header != nil {
		req.Header = header
	}
	resp, err := http.DefaultClient.Do(req)
	if err != nil {
		return err
	}
	defer resp.Body.Close()
	if resp.StatusCode != http.StatusOK {
		text, _ := io.ReadAll(io.LimitReader(resp.Body, 1000))
		return fmt.Errorf("%s %s: %s: %s", method, req.URL.Path, resp.Status, text)
	}
	return read(resp.Body, resp.Header)
}
