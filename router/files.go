package router

import (
	"errors"
	"fmt"
	"sync"
	"time"

	"github.com/xpyd/xpyd/internal/config"
	"github.com/xpyd/xpyd/internal/reread"
	"github.com/xpyd/xpyd/router/h1"
)

// files are the keys and certificates that are read again when they change. They are polled.
type files struct {
	r   *Router
	all []*watchedFile
	mu  sync.Mutex // one look at them at a time
}

// watchedFile is the files of one setting.
type watchedFile struct {
	setting string
	files   *reread.Files
	load    func() error // keeps the old ones on an error
}

// add loads a setting's files and watches them.
func (f *files) add(setting string, load func() error, paths ...string) error {
	w := &watchedFile{setting: setting, load: load, files: reread.Of(paths...)}
	w.files.Changed() // before reading them, so that no change is missed
	if err := load(); err != nil {
		return config.Bad(setting, "%v", err)
	}
	if !w.files.None() {
		f.all = append(f.all, w)
	}
	return nil
}

// reload reads what has changed, or all.
func (f *files) reload(all bool) error {
	f.mu.Lock()
	defer f.mu.Unlock()
	var errs []error
	for _, w := range f.all {
		changed, err := w.files.Changed(), w.files.Lost()
		if !changed && !all && err == nil {
			continue
		}
		if err == nil {
			err = w.load()
		}
		result := "ok"
		if err != nil {
			result = "failed"
			errs = append(errs, fmt.Errorf("%s: %w; the old ones stay in force", w.setting, err))
		} else {
			f.r.log.Info("read again", "setting", w.setting)
			if changed {
				f.r.Console.Audit("reload", "file", w.setting+" has changed and was read again")
			}
		}
		f.r.metrics.reloads.WithLabelValues(w.setting, result).Inc()
	}
	return errors.Join(errs...)
}

// follow polls them until the router ends.
func (f *files) follow() {
	tick := time.NewTicker(reread.Every)
	defer tick.Stop()
	for {
		select {
		case <-tick.C:
			if err := f.reload(false); err != nil {
				f.r.log.Error("files", "err", err)
			}
		case <-f.r.ctx.Done():
			return
		}
	}
}

// loadFiles reads keys and certificates and begins to watch their files.
func (r *Router) loadFiles() (err error) {
	c := &r.cfg
	r.files = &files{r: r}
	if c.APIKeysFile != "" {
		err = r.files.add("api_keys_file", r.flights.LoadKeys, c.APIKeysFile)
	}
	if c.TLSCert != "" && err == nil {
		r.tls = h1.ServerTLS{Cert: c.TLSCert, Key: c.TLSKey, ClientCA: c.TLSClientCA}
		err = r.files.add("tls_cert", r.tls.Load, c.TLSCert, c.TLSKey, c.TLSClientCA)
	}
	if c.AdminTLSCert != "" && err == nil {
		r.adminTLS = h1.ServerTLS{Cert: c.AdminTLSCert, Key: c.AdminTLSKey}
		err = r.files.add("admin_tls_cert", r.adminTLS.Load, c.AdminTLSCert, c.AdminTLSKey)
	}
	if err == nil {
		err = r.files.add("upstream", r.up.LoadTLS, c.Upstream.CA, c.Upstream.Cert, c.Upstream.Key)
	}
	if c.Upstream.InsecureSkipVerify {
		r.log.Warn("upstream.insecure_skip_verify: whoever answers at an https address of an engine is believed to be it")
	}
	return err
}
