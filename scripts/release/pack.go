package main

import (
	"encoding/json"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"time"
)

// content is a file of a package, as nfpm's configuration names it.
type content struct {
	Src      string   `json:"src"`
	Dst      string   `json:"dst"`
	Type     string   `json:"type,omitempty"`
	FileInfo fileInfo `json:"file_info"`
}

type fileInfo struct {
	Mode  uint32    `json:"mode"`
	MTime time.Time `json:"mtime"`
}

// installed says where a release's files go. A folder ends in a slash.
var installed = map[string]string{
	"xpyd":                          "/usr/bin/xpyd",
	"LICENSE":                       "/usr/share/doc/xpyd/copyright",
	"CHANGELOG.md":                  "/usr/share/doc/xpyd/",
	"configs/":                      "/usr/share/doc/xpyd/samples/",
	"man/":                          "/usr/share/man/man1/",
	"completions/xpyd.bash":         "/usr/share/bash-completion/completions/xpyd",
	"completions/_xpyd":             "/usr/share/zsh/vendor-completions/_xpyd",
	"completions/xpyd.fish":         "/usr/share/fish/vendor_completions.d/xpyd.fish",
	"systemd/xpyd-router.service":   "/usr/lib/systemd/system/",
	"systemd/xpyd-prefill@.service": "/usr/lib/systemd/system/",
	"systemd/xpyd-decode@.service":  "/usr/lib/systemd/system/",
	"systemd/xpyd.sysusers":         "/usr/lib/sysusers.d/xpyd.conf",
}

// kept are configurations: whoever changes them keeps them at an upgrade.
var kept = map[string]string{
	"systemd/router.yaml": "/etc/xpyd/router.yaml",
	"systemd/worker.yaml": "/etc/xpyd/worker.yaml",
}

// contents lists what a package of the tree has.
func contents(tree string, at time.Time) ([]content, error) {
	var list []content
	add := func(from, to, kind string) error {
		info, err := os.Stat(filepath.Join(tree, from))
		if err != nil {
			return err
		}
		if strings.HasSuffix(to, "/") {
			to += filepath.Base(from)
		}
		list = append(list, content{filepath.Join(tree, from), to, kind, fileInfo{uint32(info.Mode().Perm()), at}})
		return nil
	}
	for from, to := range installed {
		if !strings.HasSuffix(from, "/") {
			if err := add(from, to, ""); err != nil {
				return nil, err
			}
			continue
		}
		entries, err := os.ReadDir(filepath.Join(tree, from))
		if err != nil {
			return nil, err
		}
		for _, e := range entries {
			if err := add(from+e.Name(), to, ""); err != nil {
				return nil, err
			}
		}
	}
	for from, to := range kept {
		if err := add(from, to, "config|noreplace"); err != nil {
			return nil, err
		}
	}
	return list, nil
}

// pack has nfpm make a deb or an rpm. JSON is YAML, too.
func (r *release) pack(kind, arch, tree, to string) error {
	list, err := contents(tree, r.at)
	if err != nil {
		return err
	}
	folder, err := filepath.Abs("configs/systemd")
	if err != nil {
		return err
	}
	config, err := json.Marshal(map[string]any{
		"name": "xpyd", "arch": arch, "platform": "linux", "version": r.version, "section": "net", "priority": "optional",
		"maintainer": "the xpyd authors <xpyd@users.noreply.github.com>", "license": "Apache-2.0", "homepage": "https://github.com/xpyd/xpyd",
		"description": "Serve large language models with prefill and decode on separate workers.\nThe router, the workers and the tools in one static binary.",
		"mtime":       r.at, "contents": list,
		"scripts": map[string]string{"postinstall": filepath.Join(folder, "postinstall"), "preremove": filepath.Join(folder, "preremove")},
		"rpm":     map[string]string{"buildhost": "xpyd", "summary": "Large language models with prefill and decode on separate workers"},
	})
	if err != nil {
		return err
	}
	path := filepath.Join(r.work, "nfpm.yaml")
	if err := os.WriteFile(path, config, 0o600); err != nil {
		return err
	}
	cmd := exec.CommandContext(r.ctx, "go", "run", packager, "package", "--config", path, "--packager", kind, "--target", to)
	cmd.Env = r.reproducible()
	return quiet(cmd)
}
