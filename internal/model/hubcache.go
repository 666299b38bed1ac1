package model

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"github.com/xpyd/xpyd/internal/hostfile"
)

// hubCache is one repository's folder in the cache that every Hugging Face
// tool shares:
//
//	models--OWNER--NAME/blobs/ETAG                content
//	models--OWNER--NAME/blobs/ETAG.incomplete     a download under way
//	models--OWNER--NAME/refs/REVISION             its commit
//	models--OWNER--NAME/snapshots/COMMIT/FILE     link to ../../blobs/ETAG
//	.locks/models--OWNER--NAME/ETAG.lock          held while a blob is written
type hubCache struct {
	dir   string // …/models--OWNER--NAME
	locks string // …/.locks/models--OWNER--NAME
}

func newHubCache(r repo, getenv func(string) string) (hubCache, error) {
	root := getenv("HF_HUB_CACHE")
	if root == "" {
		home, base := getenv("HF_HOME"), getenv("XDG_CACHE_HOME")
		if home == "" && base == "" {
			user, err := os.UserHomeDir()
			if err != nil {
				return hubCache{}, fmt.Errorf("no place for the hub's cache, set HF_HOME: %w", err)
			}
			base = filepath.Join(user, ".cache")
		}
		root = filepath.Join(cmp.Or(home, filepath.Join(base, "huggingface")), "hub")
	}
	name := "models--" + r.owner + "--" + r.name
	return hubCache{dir: filepath.Join(root, name), locks: filepath.Join(root, ".locks", name)}, nil
}

func (c hubCache) snapshot(commit string) string { return filepath.Join(c.dir, "snapshots", commit) }
func (c hubCache) blob(etag string) string       { return filepath.Join(c.dir, "blobs", etag) }

// find returns the snapshot of a revision and whether it has all weights.
func (c hubCache) find(rev string) (dir string, complete bool) {
	commit := rev
	if !commitID.MatchString(rev) {
		b, err := os.ReadFile(filepath.Join(c.dir, "refs", filepath.FromSlash(rev)))
		if err != nil {
			return "", false
		}
		if commit = strings.TrimSpace(string(b)); !commitID.MatchString(commit) {
			return "", false
		}
	}
	dir = c.snapshot(commit)
	d := folder{fs: os.DirFS(dir), root: dir}
	files, owner, err := d.weights()
	lacks := func(name string) bool { return !d.exists(name) }
	if err != nil || lacks("config.json") || owner == nil && lacks("model.safetensors") || slices.ContainsFunc(files, lacks) {
		return dir, false
	}
	return dir, true
}

// setRef remembers the commit that a branch or tag stood for.
func (c hubCache) setRef(rev, commit string) error {
	if rev == commit {
		return nil
	}
	path := filepath.Join(c.dir, "refs", filepath.FromSlash(rev))
	if b, err := os.ReadFile(path); err == nil && string(b) == commit {
		return nil
	}
	return hostfile.Write(path, []byte(commit))
}

// link makes the snapshot's file point at the blob.
func (c hubCache) link(commit, name, etag string) error {
	to := filepath.Join(c.snapshot(commit), name)
	if err := os.MkdirAll(filepath.Dir(to), 0o755); err != nil {
		return err
	}
	if _, err := os.Stat(to); err == nil {
		return nil
	}
	// Replace a dangling link.
	if err := os.Remove(to); err != nil && !errors.Is(err, os.ErrNotExist) {
		return err
	}
	if err := os.Symlink(filepath.Join("..", "..", "blobs", etag), to); err != nil && !errors.Is(err, os.ErrExist) {
		return err // where it exists another process was quicker
	}
	return nil
}

// lock takes the blob's lock as Python's filelock takes it.
func (c hubCache) lock(ctx context.Context, etag string) (unlock func(), err error) {
	if err := os.MkdirAll(c.locks, 0o755); err != nil {
		return nil, err
	}
	return hostfile.Lock(ctx, filepath.Join(c.locks, etag+".lock"))
}
