package model

import (
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"
	"time"

	"github.com/xpyd/xpyd/internal/hostfile"
)

// printCache remembers one model's fingerprint in a small file, named after the weight
// files' paths and valid while their sizes and times are unchanged. An unreadable or
// stale file counts as absent.
type printCache struct {
	path   string // "": nothing is remembered
	state  string // digest of configuration, sizes, times
	newest time.Time
}

// printRecord is the content of a cache file.
type printRecord struct {
	State       string `json:"state"`
	Fingerprint string `json:"fingerprint"`
}

func newPrintCache(m *Model, opts Options) printCache {
	dir := opts.CacheDir
	if dir == "" {
		base, err := os.UserCacheDir()
		if err != nil {
			return printCache{}
		}
		dir = filepath.Join(base, "xpyd")
	}
	var c printCache
	files, state := sha256.New(), sha256.New()
	state.Write([]byte(fingerprintMagic + m.Config.Canonical()))
	for _, mp := range m.maps {
		if mp.path == "" {
			return printCache{} // embedded: hashing it is quicker than a file
		}
		files.Write(fmt.Appendf(nil, "%d:%s", len(mp.path), mp.path))
		state.Write(fmt.Appendf(nil, "%d:%s %d %d\n", len(mp.path), mp.path, len(mp.data), mp.modTime.UnixNano()))
		if mp.modTime.After(c.newest) {
			c.newest = mp.modTime
		}
	}
	c.path = filepath.Join(dir, "fingerprints", hex.EncodeToString(files.Sum(nil)[:16])+".json")
	c.state = hex.EncodeToString(state.Sum(nil))
	return c
}

func (c printCache) load() (string, bool) {
	if c.path == "" {
		return "", false
	}
	f, err := os.Open(c.path)
	if err != nil {
		return "", false
	}
	defer f.Close()
	b := make([]byte, 1024)
	n, _ := f.Read(b)
	var r printRecord
	if json.Unmarshal(b[:n], &r) != nil || r.State != c.state {
		return "", false
	}
	if sum, err := hex.DecodeString(r.Fingerprint); err != nil || len(sum) != sha256.Size {
		return "", false
	}
	return r.Fingerprint, true
}

// save writes the record. Files changed within two seconds of start are not
// remembered: a second change could leave their times as they are.
func (c printCache) save(fp string, start time.Time) error {
	if c.path == "" || start.Sub(c.newest) < 2*time.Second {
		return nil
	}
	b, err := json.Marshal(printRecord{State: c.state, Fingerprint: fp})
	if err != nil {
		return err
	}
	return hostfile.Write(c.path, append(b, '\n'))
}
