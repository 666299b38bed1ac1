package main

import (
	"bytes"
	"context"
	"crypto/tls"
	"crypto/x509"
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"time"

	"github.com/spf13/cobra"
)

// adminFlags find the admin listener of a router: by flag, by environment, or
// by the files that a router on this machine leaves in its data folder.
type adminFlags struct{ url, token, data, ca string }

func (a *adminFlags) register(cmd *cobra.Command) {
	f := cmd.Flags()
	f.StringVar(&a.url, "admin", "", "URL of the router's admin listener; default: the one in --data, else http://127.0.0.1:8001")
	f.StringVar(&a.token, "token", "", "admin token; default: XPYD_ADMIN_TOKEN, else the one in --data")
	f.StringVar(&a.ca, "admin-ca", "", "PEM file of who vouches for an https admin listener; default: the one's own in --data, else the system's")
	f.StringVar(&a.data, "data", defaultData(), "data folder of the router")
}

func (a *adminFlags) file(name string) string {
	b, err := os.ReadFile(filepath.Join(a.data, name))
	if err != nil {
		return ""
	}
	return strings.TrimSpace(string(b))
}

func (a *adminFlags) base() string {
	for _, u := range []string{a.url, a.file(fileAdmin), "http://127.0.0.1:8001"} {
		if u != "" && !strings.Contains(u, "://") {
			u = "http://" + u
		}
		if u != "" {
			return strings.TrimSuffix(u, "/")
		}
	}
	return ""
}

func (a *adminFlags) bearer() string {
	for _, t := range []string{a.token, os.Getenv("XPYD_ADMIN_TOKEN"), a.file(fileToken)} {
		if t != "" {
			return t
		}
	}
	return ""
}

// client believes the certificate that is asked for, or that the router on this
// machine has left.
func (a *adminFlags) client() (*http.Client, error) {
	path := a.ca
	if path == "" {
		path = a.file(fileAdminCert)
	}
	t := &http.Transport{Proxy: http.ProxyFromEnvironment}
	if path != "" {
		text, err := os.ReadFile(path)
		if err != nil {
			return nil, fmt.Errorf("certificate of the admin listener: %w", err)
		}
		roots := x509.NewCertPool()
		if !roots.AppendCertsFromPEM(text) {
			return nil, fmt.Errorf("certificate of the admin listener: %s: no certificates in PEM", path)
		}
		t.TLSClientConfig = &tls.Config{RootCAs: roots, MinVersion: tls.VersionTLS12}
	}
	return &http.Client{Transport: t}, nil
}

// call does one request; in and out are JSON and may be nil.
func (a *adminFlags) call(ctx context.Context, method, path string, in, out any) error {
	ctx, cancel := context.WithTimeout(ctx, 15*time.Second)
	defer cancel()
	var body io.Reader
	if in != nil {
		b, err := json.Marshal(in)
		if err != nil {
			return err
		}
		body = bytes.NewReader(b)
	}
	req, err := http.NewRequestWithContext(ctx, method, a.base()+path, body)
	if err != nil {
		return err
	}
	req.Header.Set("Authorization", "Bearer "+a.bearer())
	client, err := a.client()
	if err != nil {
		return err
	}
	defer client.CloseIdleConnections()
	resp, err := client.Do(req)
	if err != nil {
		return fmt.Errorf("no router at %s (%w); is it running? --admin and --data say where", a.base(), err)
	}
	defer resp.Body.Close()
	b, err := io.ReadAll(io.LimitReader(resp.Body, 64<<20))
	if err != nil {
		return err
	}
	if resp.StatusCode >= 300 {
		var e struct{ Error struct{ Message string } }
		if json.Unmarshal(b, &e) == nil && e.Error.Message != "" {
			return fmt.Errorf("%s", e.Error.Message)
		}
		return fmt.Errorf("%s %s: status %d", method, path, resp.StatusCode)
	}
	if out == nil {
		return nil
	}
	return json.Unmarshal(b, out)
}

// newOrder is `xpyd drain`, `undrain` or `role`.
func newOrder(use, short, example, action string, body func(args []string) any, args cobra.PositionalArgs) *cobra.Command {
	var admin adminFlags
	cmd := &cobra.Command{Use: use, Short: short, Example: example, Args: args,
		RunE: func(cmd *cobra.Command, args []string) error {
			if err := admin.call(cmd.Context(), "POST", "/admin/v1/instances/"+args[0]+"/"+action, body(args), nil); err != nil {
				return err
			}
			_, err := fmt.Fprintf(cmd.OutOrStdout(), "%s: %s\n", args[0], strings.Join(append([]string{action}, args[1:]...), " "))
			return err
		}}
	admin.register(cmd)
	return cmd
}

func none([]string) any { return nil }

func newDrain() *cobra.Command {
	return newOrder("drain ID", "Send a worker no new work; what it has goes on", "  xpyd drain decode-0", "drain", none, cobra.ExactArgs(1))
}

func newUndrain() *cobra.Command {
	return newOrder("undrain ID", "Take a drain back", "  xpyd undrain decode-0", "undrain", none, cobra.ExactArgs(1))
}

func newRole() *cobra.Command {
	return newOrder("role ID prefill|decode", "Change what a running worker does for new requests", "  xpyd role prefill-1 decode", "role",
		func(args []string) any { return map[string]string{"role": args[1]} },
		cobra.MatchAll(cobra.ExactArgs(2), func(cmd *cobra.Command, args []string) error {
			if args[1] != "prefill" && args[1] != "decode" {
				return usageError{fmt.Errorf("%q: want prefill or decode", args[1])}
			}
			return nil
		}))
}
