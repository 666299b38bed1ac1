package apikey

import (
	"bytes"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
)

const header = `# API keys of a router, as api_keys_file names it. Only hashes are here; made by
# "xpyd keys new". A running router reads the file again when it changes.
keys:
`

// Append adds a key to the file, which it makes if there is none. The rest of the file stays
// as it is, with its comments.
func Append(path string, k Key) error {
	old, err := os.ReadFile(path)
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return fmt.Errorf("read keys: %w", err)
	}
	text, mode := old, fs.FileMode(0o600)
	if err != nil || len(bytes.TrimSpace(old)) == 0 {
		text = []byte(header)
	} else if info, err := os.Stat(path); err == nil {
		mode = info.Mode().Perm()
	}
	text = append(bytes.TrimRight(slices.Clone(text), "\n"), '\n')
	text = append(text, k.yaml()...)
	tmp, err := os.CreateTemp(filepath.Dir(path), ".keys-*")
	if err != nil {
		return fmt.Errorf("write keys: %w", err)
	}
	defer os.Remove(tmp.Name()) // no matter once it is renamed
	_, err = tmp.Write(text)
	err = errors.Join(err, tmp.Chmod(mode), tmp.Close())
	if err != nil {
		return fmt.Errorf("write keys: %w", err)
	}
	keys, err := Load(tmp.Name())
	if err == nil && !slices.ContainsFunc(keys, func(o Key) bool { return o.SHA256 == k.SHA256 }) {
		err = errors.New("the file does not end with its list of keys")
	}
	if err != nil {
		return fmt.Errorf("add the key to %s: %s", path, strings.ReplaceAll(err.Error(), tmp.Name(), path))
	}
	if err := os.Rename(tmp.Name(), path); err != nil {
		return fmt.Errorf("write keys: %w", err)
	}
	return nil
}

func (k *Key) yaml() string {
	var b strings.Builder
	fmt.Fprintf(&b, "- name: %s\n  sha256: %s\n", strconv.Quote(k.Name), k.SHA256)
	number := func(name string, n int64) {
		if n != 0 {
			fmt.Fprintf(&b, "  %s: %d\n", name, n)
		}
	}
	number("requests_per_minute", k.RequestsPerMinute)
	number("tokens_per_minute", k.TokensPerMinute)
	number("max_in_flight", int64(k.MaxInFlight))
	if k.Weight != 0 {
		fmt.Fprintf(&b, "  weight: %v\n", k.Weight)
	}
	if k.Priority != "" {
		fmt.Fprintf(&b, "  priority: %s\n", k.Priority)
	}
	if len(k.Models) > 0 {
		quoted := make([]string, len(k.Models))
		for i, m := range k.Models {
			quoted[i] = strconv.Quote(m)
		}
		fmt.Fprintf(&b, "  models: [%s]\n", strings.Join(quoted, ", "))
	}
	if k.NamesTenants {
		b.WriteString("  names_tenants: true\n")
	}
	if !k.Expires.IsZero() {
		fmt.Fprintf(&b, "  expires: %s\n", k.Expires.UTC().Format("2006-01-02T15:04:05Z"))
	}
	return b.String()
}
