package worker

import (
	"context"
	"errors"
	"fmt"
	"net"
	"sync"

	"github.com/xpyd/xpyd/decode"
	"github.com/xpyd/xpyd/internal/clientwatch"
	"github.com/xpyd/xpyd/internal/fleet"
	"github.com/xpyd/xpyd/internal/scarce"
	"github.com/xpyd/xpyd/kvconn"
	"github.com/xpyd/xpyd/kvconn/way"
	"github.com/xpyd/xpyd/prefill"
)

func (w *Worker) startKV(d Deps) error {
	if folder := w.cfg.KV.Sockets; folder != "" {
		if err := way.CheckSockets(folder); err != nil {
			return bad("kv.sockets", "%v", err)
		}
	}
	ways, err := way.Open(d.Ways, w.cfg.KV.Transport, way.Pool{Backend: w.backend}, w.log)
	if err != nil {
		return bad("kv.transport", "%v", err)
	}
	metrics, err := kvconn.NewMetrics(w.registry)
	if err != nil {
		return err
	}
	w.moved, w.movedFrom = metrics.Moved, metrics.MovedFrom
	cfg := w.cfg.kvconn(w.identity)
	cfg.Shared, cfg.Ring = ways.Shared(), w.ring
	if w.recv, err = kvconn.NewReceiver(cfg, ways, w.log, metrics); err != nil {
		return err
	}
	dcfg := decode.DefaultConfig(w.cache.Blocks())
	dcfg.ReserveTimeout = w.cfg.ReserveWait
	dcfg.Warm = func(ctx context.Context, tokens []int32, salt string) {
		w.tiers.Load(ctx, tokens, salt, len(tokens)-1) // the last one is computed, for its logits
	}
	if w.cfg.KV.Peers == "on" {
		dcfg.Self = w.self
	}
	if dcfg.Metrics, err = decode.NewMetrics(w.registry); err != nil {
		return err
	}
	if w.cfg.KV.MaxQuarantined > 0 {
		dcfg.MaxQuarantined = w.cfg.KV.MaxQuarantined
	}
	w.chooser, err = way.NewChooser(way.Config{Ways: ways, Recv: w.recv, Machine: way.Machine(w.cfg.KV.Sockets), Find: func(addr string, id kvconn.PeerID) way.Peer { return w.fleet.reachedBy(addr, id) }, Publish: w.publishPaths, Log: w.log, Register: w.registry})
	if err != nil {
		return err
	}
	w.decode = decode.New(dcfg, w.chooser, w.cache, w.backend, w.log)
	w.later("close sessions to prefill", func(ctx context.Context) error {
		w.chooser.Close()
		err := w.recv.Close(ctx)
		w.decode.Close()
		return err
	})
	if err := w.openPeers(); err != nil {
		return err
	}
	pcfg := prefill.DefaultConfig()
	pcfg.Lease, pcfg.MaxLease, pcfg.TicketWait = w.cfg.LeaseTime, w.cfg.LeaseMax, w.cfg.TicketWait
	pcfg.Warm, pcfg.Give, pcfg.GiveTime = w.bringPrefix, w.givePrefix, 2*w.cfg.KV.LoadTimeout
	pcfg.Ran, pcfg.Guide = w.vllm.prefilled, w.binder.Guide
	if pcfg.Metrics, err = prefill.NewMetrics(w.registry); err != nil {
		return err
	}
	w.prefill = prefill.New(pcfg, w.engine, w.backend, w.backend.Layout(), w.log)
	if w.server, err = kvconn.NewServer(cfg, w.log, metrics); err != nil {
		return err
	}
	ln, err := ways.Listen(w.cfg.KVListen)
	if err != nil {
		return fmt.Errorf("kv_listen: %w", err)
	}
	if w.kvAddr, err = w.advertised(ln.Addr()); err != nil {
		return errors.Join(err, ln.Close())
	}
	var listeners []net.Listener
	if listeners, w.kvWays, err = ways.Offer(w.kvAddr); err != nil {
		return errors.Join(bad("kv.transport", "%v", err), ln.Close())
	}
	listeners = append(listeners, ln)
	serve, stop := context.WithCancel(context.Background())
	var running sync.WaitGroup
	for _, ln := range listeners {
		running.Go(func() {
			if err := w.server.Serve(serve, ln, w.prefill); err != nil && serve.Err() == nil {
				w.fail(fmt.Errorf("kv listener: %w", err))
			}
		})
	}
	done := make(chan struct{})
	go func() {
		defer close(done)
		running.Wait()
	}()
	w.later("end sessions of decode", func(ctx context.Context) error {
		err := w.server.Drain(ctx)
		w.prefill.Close()
		stop()
		select {
		case <-done:
			return err
		case <-ctx.Done():
			return errors.Join(err, errors.New("ticket handlers still run"))
		}
	})
	return nil
}

// publishPaths announces by which transports this worker reaches prefill workers.
func (w *Worker) publishPaths(summary string) {
	if err := w.fleet.update(func(i *fleet.Instance) { i.KVPaths = summary }); err != nil {
		w.log.Warn("announce kv paths", "error", err)
	}
}

// listenHTTP opens the HTTP listener; w.http answers on it once started.
func (w *Worker) listenHTTP(listen func(network, addr string) (net.Listener, error)) (net.Listener, error) {
	if listen == nil {
		listen = net.Listen
	}
	var err error
	if w.clients, err = clientwatch.New(); err != nil {
		return nil, err
	}
	w.later("stop watching clients", func(context.Context) error { return w.clients.Close() })
	ln, err := listen("tcp", w.cfg.Listen)
	if err != nil {
		return nil, fmt.Errorf("listen: %w", err)
	}
	ln = scarce.Listener(ln, w.log, w.failedAccepts.WithLabelValues("http"))
	ln = newLobby(mostConns(scarce.Files())).Listener(ln, guestPatience)
	w.http = w.newHTTP()
	w.later("close the HTTP listener", func(ctx context.Context) error {
		// Streams and lifelines may hold their connections for ever: end them now.
		w.requests.close()
		w.lifelines.close()
		w.cancel(errClosing)
		err := w.http.Drain(ctx) // does not close ln if it was never served
		w.http.Cut()
		if e := ln.Close(); e != nil && !errors.Is(e, net.ErrClosed) {
			err = errors.Join(err, e)
		}
		return errors.Join(err, w.requests.wait(ctx), w.lifelines.wait(ctx))
	})
	addr, err := w.advertised(ln.Addr())
	w.url = w.scheme() + "://" + addr
	return ln, err
}

// scheme is the scheme of the URLs of this worker and its peers.
func (w *Worker) scheme() string {
	if w.tls != nil {
		return "https"
	}
	return "http"
}

// advertised is the address that others dial for a listener of ours.
func (w *Worker) advertised(a net.Addr) (string, error) {
	host, port, err := net.SplitHostPort(a.String())
	if err != nil {
		return "", err
	}
	if w.cfg.Advertise != "" {
		return net.JoinHostPort(w.cfg.Advertise, port), nil
	}
	if ip := net.ParseIP(host); ip == nil || !ip.IsUnspecified() {
		return net.JoinHostPort(host, port), nil
	}
	addrs, err := net.InterfaceAddrs()
	if err != nil {
		return "", err
	}
	for _, a := range addrs {
		if n, ok := a.(*net.IPNet); ok && n.IP.IsGlobalUnicast() {
			return net.JoinHostPort(n.IP.String(), port), nil
		}
	}
	return "", bad("advertise", "listening on every address, and none can be found that others could dial; set it")
}
