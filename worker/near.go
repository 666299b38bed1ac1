package worker

import (
	"errors"
	"fmt"

	"github.com/xpyd/xpyd/kernels"
	"github.com/xpyd/xpyd/kvconn"
)

// nearWay is the fast way between workers of one machine. A worker has one: its
// pool lies in a GPU's memory, which other GPUs write to (cudaipc), or in host
// memory, which other processes do (shm).
type nearWay struct {
	name      string
	transport kvconn.Transport // nil: this process has none, or may not use it
	pool      *kvconn.Shared   // ours, for peers to write to; nil: see private
	private   error            // why our pool is written to by nobody
	linked    kvconn.Transport // by NCCL, of a GPU; nil: none
	pinned    kvconn.Transport // through pinned memory, of a GPU; nil: none
	staged    []stagedWay      // both, of a GPU, as far as the setting allows them; fastest first
}

// stagedWay is a way through memory between two GPUs' pools.
type stagedWay struct {
	name    string
	private string // why this process has none; "": it has
}

// local tells whether the setting allows the local transport of that name.
func (k *KV) local(name string) bool { return k.Transport == transportAuto || k.Transport == name }

// near finds the fast way for the backend.
func (w *Worker) near(d Deps) nearWay {
	exporter, out := w.backend.(kernels.Exporter)
	opener, in := w.backend.(kernels.PeerOpener)
	if out && in && w.cfg.KV.Transport != transportSHM {
		return w.nearDevice(d, exporter, opener)
	}
	if t := w.cfg.KV.Transport; t == transportIPC || t == transportNCCL || t == transportPinned {
		return nearWay{name: t, private: fmt.Errorf("the pool of device %s is not in a GPU's memory", w.backend.Info().Name)}
	}
	way := nearWay{name: transportSHM}
	if w.cfg.KV.local(transportSHM) {
		way.transport = d.Local
	}
	way.pool, way.private = w.shared(d)
	return way
}

// nearDevice is near for a GPU.
func (w *Worker) nearDevice(d Deps, exporter kernels.Exporter, opener kernels.PeerOpener) nearWay {
	way := nearWay{name: transportIPC}
	switch {
	case !w.cfg.KV.local(transportIPC):
		way.private = fmt.Errorf("kv.transport is %s", w.cfg.KV.Transport)
	case d.Device == nil:
		way.private = errors.New("this process has no transport between GPUs")
	default:
		if _, way.private = exporter.Export(); way.private == nil {
			way.transport, way.private = d.Device(exporter, opener, w.cfg.KV.DeviceRefill == "on")
		}
	}
	w.nearStaged(d, &way)
	if way.private == nil || way.linked != nil || way.pinned != nil {
		way.pool = kvconn.DevicePool(w.identity.Layout, w.backend.Blocks())
	}
	return way
}

// nearStaged adds the ways between GPUs that do not reach each other's memory.
func (w *Worker) nearStaged(d Deps, way *nearWay) {
	add := func(name string, make func() error) {
		if !w.cfg.KV.local(name) {
			return
		}
		err := make()
		if err != nil {
			w.log.Warn("GPUs that do not reach each other must use another way", "not", name, "error", err)
		}
		way.staged = append(way.staged, stagedWay{name, text(err)})
	}
	add(transportNCCL, func() error {
		l, ok := w.backend.(kernels.Linker)
		if !ok || d.Linked == nil {
			return errors.New("this process has none")
		}
		way.linked = d.Linked(d.Transport, l, l, w.backend.Layout())
		return nil
	})
	add(transportPinned, func() (err error) {
		m, ok := w.backend.(kernels.HostMover)
		if !ok || d.Pinned == nil {
			return errors.New("this process has none")
		}
		if way.pinned, err = d.Pinned(m, m, w.backend.Layout()); err != nil {
			way.pinned = nil
		}
		return err
	})
}

// shared describes a pool in host memory to kvconn, or says why it cannot be
// shared.
func (w *Worker) shared(d Deps) (*kvconn.Shared, error) {
	switch {
	case !w.cfg.KV.local(transportSHM):
		return nil, fmt.Errorf("kv.transport is %s", w.cfg.KV.Transport)
	case d.Local == nil && d.NoLocal != nil:
		return nil, d.NoLocal
	case d.Local == nil:
		return nil, errors.New("this process has no local transport")
	}
	sharer, ok := w.backend.(kernels.Sharer)
	if !ok {
		return nil, fmt.Errorf("the pool of device %s is not in shared memory", w.backend.Info().Name)
	}
	s, err := sharer.Shared()
	if err != nil {
		return nil, err
	}
	out := &kvconn.Shared{FD: s.FD, Bytes: s.Bytes, Blocks: w.backend.Blocks()}
	for i, layer := range w.backend.Layout().Resolve() {
		out.Layers = append(out.Layers, kvconn.Span{Offset: s.Layers[i], Stride: int64(layer.BlockBytes())})
	}
	w.log.Info("kv pool is in shared memory", "bytes", s.Bytes, "pages", s.Pages)
	return out, nil
}

// announceNear notes where workers of this machine dial us.
func (w *Worker) announceNear(name, addr string) {
	if name == transportIPC {
		w.kvDevice = addr
	} else {
		w.kvLocal = addr
	}
}
