package main

import (
	"bytes"
	"cmp"
	"context"
	"crypto/tls"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"net/http"
	"os"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"github.com/xpyd/xpyd/internal/datadir"
	"github.com/xpyd/xpyd/internal/fleet"
	"github.com/xpyd/xpyd/internal/trust"
)

// adminFlags find the admin listener of a router: by flag, by environment, or by the files that a
// router on this machine keeps in its data folder.
type adminFlags struct{ url, token, data, ca string }

// adminCommand completes a command that asks a router.
func adminCommand(cmd *cobra.Command, run func(cmd *cobra.Command, admin *adminFlags, args []string) error) *cobra.Command {
	admin := &adminFlags{}
	admin.register(cmd)
	cmd.RunE = func(cmd *cobra.Command, args []string) error { return run(cmd, admin, args) }
	return cmd
}

func (a *adminFlags) register(cmd *cobra.Command) {
	f := cmd.Flags()
	f.StringVar(&a.url, "admin", "", "URL of the router's admin listener; default: the one in --data, else http://127.0.0.1:8001")
	f.StringVar(&a.token, "token", "", "admin token; default: XPYD_ADMIN_TOKEN, else the one in --data, else XPYD_ADMIN_TOKEN_RO, which only reads")
	f.StringVar(&a.ca, "admin-ca", "", "PEM file of the CA of an https admin listener; default: the listener's certificate in --data, else the system's CAs")
	f.StringVar(&a.data, "data", dataDefault(), "data folder of the router")
}

// found is a router's URL, the token that it wants, and a file with its certificate.
type found struct{ url, token, ca string }

// errNoData refuses what a script's empty variable gives: the current folder, or another router's.
var errNoData = usageError{errors.New("--data is empty, or XPYD_DATA: it must name a folder")}

// dataDefault is the default of --data for those who ask a router.
func dataDefault() string {
	if d, given := os.LookupEnv("XPYD_DATA"); given && d == "" {
		return ""
	}
	return datadir.Default()
}

// find reads flags, the environment and the data folder. If others could have made the folder, or a
// killed router left it, nothing is sent: others may listen at its address by now.
func (a *adminFlags) find() (found, error) {
	if a.data == "" {
		return found{}, errNoData
	}
	t := found{url: a.url, token: cmp.Or(a.token, os.Getenv("XPYD_ADMIN_TOKEN")), ca: a.ca}
	if t.url == "" || t.token == "" || t.ca == "" && strings.HasPrefix(t.url, "https:") {
		if err := a.look(&t); err != nil {
			return found{}, err
		}
	}
	t.token = cmp.Or(t.token, os.Getenv("XPYD_ADMIN_TOKEN_RO"))
	t.url = cmp.Or(t.url, "http://127.0.0.1:8001")
	if !strings.Contains(t.url, "://") {
		t.url = "http://" + t.url
	}
	t.url = strings.TrimSuffix(t.url, "/")
	return t, nil
}

// look fills in what a router on this machine has left. Its token is used only for the address in
// its own files, or for the one that the user gives.
func (a *adminFlags) look(t *found) error {
	dir, err := datadir.Open(a.data)
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	if err != nil {
		return err
	}
	defer dir.Close()
	file := func(name string, to *string) {
		if *to != "" || err != nil {
			return
		}
		text, readErr := dir.Read(name)
		if errors.Is(readErr, fs.ErrNotExist) {
			return
		}
		*to, err = strings.TrimSpace(string(text)), readErr
	}
	named := t.url != ""
	file(fileAdmin, &t.url)
	if err == nil && !named && t.url != "" {
		var taken bool
		if taken, err = dir.Taken(); err == nil && !taken {
			err = fmt.Errorf("no router runs on %s: start one, or say where it is with --admin or --data", dir.Path())
		}
	}
	file(fileAdminCert, &t.ca)
	if t.url != "" {
		file(fileToken, &t.token)
	}
	return err
}

// client trusts the certificate in f.ca, if there is one.
func (f *found) client() (*http.Client, error) {
	t := &http.Transport{Proxy: http.ProxyFromEnvironment}
	if f.ca != "" {
		roots, err := trust.CertPool(f.ca)
		if err != nil {
			return nil, fmt.Errorf("certificate of the admin listener: %w", err)
		}
		t.TLSClientConfig = &tls.Config{RootCAs: roots, MinVersion: tls.VersionTLS12}
	}
	return &http.Client{Transport: t}, nil
}

// Bounds of requests. An order may wait for a worker that is starting.
const callWait, orderWait = 15 * time.Second, 45 * time.Second

// call makes a request; in and out are JSON and may be nil.
func (a *adminFlags) call(ctx context.Context, method, path string, in, out any) error {
	return a.callWithin(ctx, callWait, method, path, in, out)
}

func (a *adminFlags) callWithin(ctx context.Context, limit time.Duration, method, path string, in, out any) error {
	ctx, cancel := context.WithTimeout(ctx, limit)
	defer cancel()
	var body io.Reader
	if in != nil {
		b, err := json.Marshal(in)
		if err != nil {
			return err
		}
		body = bytes.NewReader(b)
	}
	b, err := a.ask(ctx, method, path, body)
	if err != nil || out == nil {
		return err
	}
	return json.Unmarshal(b, out)
}

const maxAnswer = 64 << 20

// ask makes a request and returns the body of a successful response.
func (a *adminFlags) ask(ctx context.Context, method, path string, body io.Reader) ([]byte, error) {
	at, err := a.find()
	if err != nil {
		return nil, err
	}
	req, err := http.NewRequestWithContext(ctx, method, at.url+path, body)
	if err != nil {
		return nil, err
	}
	req.Header.Set("Authorization", "Bearer "+at.token)
	client, err := at.client()
	if err != nil {
		return nil, err
	}
	defer client.CloseIdleConnections()
	resp, err := client.Do(req)
	if err != nil {
		return nil, fmt.Errorf("no router at %s (%w); is it running? Say where with --admin or --data", at.url, err)
	}
	defer resp.Body.Close()
	b, err := io.ReadAll(io.LimitReader(resp.Body, maxAnswer))
	if err != nil {
		return nil, err
	}
	if resp.StatusCode == http.StatusUnauthorized && at.token == "" {
		return nil, fmt.Errorf("the router at %s wants its admin token, and %s has none: say where its data folder is with --data, or give --token", at.url, a.data)
	}
	if resp.StatusCode >= 300 {
		var e struct{ Error struct{ Message string } }
		if json.Unmarshal(b, &e) == nil && e.Error.Message != "" {
			return nil, errors.New(e.Error.Message)
		}
		return nil, fmt.Errorf("%s %s: status %d", method, path, resp.StatusCode)
	}
	return b, nil
}

// newAdmin is `xpyd admin`: requests that have no command of their own.
func newAdmin() *cobra.Command {
	var method, data string
	cmd := adminCommand(&cobra.Command{
		Use: "admin PATH [--request METHOD] [--json BODY]", Short: "Ask a router's admin API, without a token on the command line",
		Long: `Ask a router's admin API and print the response. PATH is below /admin/v1, unless it
begins with a slash. The request is a GET, or with --json a POST.`,
		Example: "  xpyd admin cache\n  xpyd admin cache/flush --request POST\n  xpyd admin cache/pin --json '{\"prompt\": \"You are a helpful assistant.\", \"ttl_s\": 3600}'\n  xpyd admin /debug/requests/REQUEST",
		Args:    cobra.ExactArgs(1),
	}, func(cmd *cobra.Command, admin *adminFlags, args []string) error {
		path := args[0]
		if !strings.HasPrefix(path, "/") {
			path = "/admin/v1/" + path
		}
		verb, body := "GET", io.Reader(nil)
		if cmd.Flags().Changed("json") {
			verb, body = "POST", strings.NewReader(data)
		}
		ctx, cancel := context.WithTimeout(cmd.Context(), orderWait)
		defer cancel()
		b, err := admin.ask(ctx, cmp.Or(strings.ToUpper(method), verb), path, body)
		if err != nil {
			return err
		}
		if n := len(b); n > 0 && json.Valid(b) && b[n-1] != '\n' {
			b = append(b, '\n')
		}
		_, err = cmd.OutOrStdout().Write(b)
		return err
	})
	cmd.Flags().StringVarP(&method, "request", "X", "", "method; default: GET, or POST with --json")
	cmd.Flags().StringVar(&data, "json", "", "body")
	return cmd
}

// workerID refuses what no worker's ID can be. In a URL's path it could name something else.
func workerID(id string) error {
	err := fleet.ValidID(id)
	if id == "" {
		err = errors.New("the worker's ID is empty")
	}
	if err != nil {
		return usageError{err}
	}
	return nil
}

// order has the router change a worker, args[0], and prints the order.
func (a *adminFlags) order(cmd *cobra.Command, action string, args []string, body any) error {
	if err := workerID(args[0]); err != nil {
		return err
	}
	if err := a.callWithin(cmd.Context(), orderWait, "POST", "/admin/v1/instances/"+args[0]+"/"+action, body, nil); err != nil {
		return err
	}
	_, err := fmt.Fprintf(cmd.OutOrStdout(), "%s: %s\n", args[0], strings.Join(append([]string{action}, args[1:]...), " "))
	return err
}

const (
	forceHelp    = "also the last worker of its role that serves the model: requests then get 503"
	waitOnlyHelp = "move no streams: they end where they are"
)

func newDrain() *cobra.Command {
	var force, waitOnly bool
	var wait waiting
	cmd := adminCommand(&cobra.Command{
		Use: "drain ID", Short: "Send a worker no new work, and move a decode worker's streams to others",
		Long: `Send a worker no new work. The streams of a decode worker move to others, token for
token; those that cannot, and all with --wait-only, go on to their end, as other requests do. The
last worker of its role that serves a model is drained with --force only. The drain holds
until ` + "`xpyd undrain`" + `, even if a worker of ` + "`xpyd up`" + ` crashes; a worker that was stopped in
order starts undrained.`,
		Example: "  xpyd drain decode-0\n  xpyd drain decode-0 --wait     until its streams have moved and the rest is done",
		Args:    cobra.ExactArgs(1),
	}, func(cmd *cobra.Command, admin *adminFlags, args []string) error {
		if err := admin.order(cmd, "drain", args, map[string]bool{"force": force, "wait_only": waitOnly}); err != nil {
			return err
		}
		return wait.until(cmd, "the drain", func(ctx context.Context) (string, error) { return stillHeld(ctx, admin, args[0]) })
	})
	cmd.Flags().BoolVar(&force, "force", false, forceHelp)
	cmd.Flags().BoolVar(&waitOnly, "wait-only", false, waitOnlyHelp)
	wait.register(cmd, "until it has no request, ticket or lease left")
	return cmd
}

func newUndrain() *cobra.Command {
	return adminCommand(&cobra.Command{
		Use: "undrain ID", Short: "Take a drain back", Example: "  xpyd undrain decode-0", Args: cobra.ExactArgs(1),
	}, func(cmd *cobra.Command, admin *adminFlags, args []string) error {
		return admin.order(cmd, "undrain", args, nil)
	})
}

func newRole() *cobra.Command {
	var force, waitOnly bool
	cmd := adminCommand(&cobra.Command{
		Use: "role ID prefill|decode", Short: "Change what a running worker does for new requests",
		Long: `Change what a running worker does for new requests. The streams of a decode worker
move to others first, as far as they can within some seconds.`,
		Example: "  xpyd role prefill-1 decode",
		Args:    cobra.ExactArgs(2),
	}, func(cmd *cobra.Command, admin *adminFlags, args []string) error {
		if args[1] != "prefill" && args[1] != "decode" {
			return usageError{fmt.Errorf("%q: want prefill or decode", args[1])}
		}
		return admin.order(cmd, "role", args, map[string]any{"role": args[1], "force": force, "wait_only": waitOnly})
	})
	cmd.Flags().BoolVar(&force, "force", false, forceHelp)
	cmd.Flags().BoolVar(&waitOnly, "wait-only", false, waitOnlyHelp)
	return cmd
}
