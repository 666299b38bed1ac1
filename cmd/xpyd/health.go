package main

import (
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/url"
	"time"

	"github.com/spf13/cobra"

	"github.com/xpyd/xpyd/internal/openai"
)

func newHealth() *cobra.Command {
	var timeout time.Duration
	var cert, key string
	cmd := &cobra.Command{
		Use: "health URL", Short: "Ask a router or a worker whether it is up; for health checks of containers",
		Long: `GET URL, or its /health where it has no path, and exit with 0 if the answer is 200, else with
1. An image without a shell checks itself with it. A router's /ready also says whether it has
a pair that serves. Nothing secret is sent, so an https listener's certificate is not verified.`,
		Example: "  xpyd health http://127.0.0.1:8100\n  xpyd health http://127.0.0.1:8000/ready\n  xpyd health https://127.0.0.1:8100 --cert member.pem --key member-key.pem",
		Args:    cobra.ExactArgs(1),
		RunE: func(cmd *cobra.Command, args []string) error {
			u, err := url.Parse(args[0])
			switch {
			case err != nil || u.Host == "" || u.Scheme != "http" && u.Scheme != "https":
				return usageError{fmt.Errorf("%q is not http://host:port or https://host:port", openai.Clip(args[0]))}
			case u.User != nil:
				return usageError{errors.New("the address has a user, and nothing secret is sent: leave it out")}
			case (cert == "") != (key == ""):
				return usageError{errors.New("--cert and --key go together")}
			case timeout <= 0:
				return usageError{fmt.Errorf("--timeout: %v is not above 0", timeout)}
			}
			if u.Path == "" || u.Path == "/" {
				u.Path = "/health"
			}
			how := &tls.Config{InsecureSkipVerify: true, MinVersion: tls.VersionTLS12} //nolint:gosec // see Long
			if cert != "" {
				pair, err := tls.LoadX509KeyPair(cert, key)
				if err != nil {
					return fmt.Errorf("--cert: %w", err)
				}
				how.Certificates = []tls.Certificate{pair}
			}
			ctx, cancel := context.WithTimeout(cmd.Context(), timeout)
			defer cancel()
			return healthy(ctx, u.String(), how)
		},
	}
	f := cmd.Flags()
	f.DurationVar(&timeout, "timeout", 2*time.Second, "how long to wait for the answer")
	f.StringVar(&cert, "cert", "", "certificate to show to a worker that asks for one of its fleet's (fleet.tls_cert)")
	f.StringVar(&key, "key", "", "its key")
	return cmd
}

// maxSick bounds what is shown of an answer that is no 200.
const maxSick = 1 << 10

// healthy gets url, through no proxy.
func healthy(ctx context.Context, url string, how *tls.Config) error {
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, url, nil)
	if err != nil {
		return err
	}
	t := &http.Transport{TLSClientConfig: how, DisableKeepAlives: true}
	defer t.CloseIdleConnections()
	resp, err := (&http.Client{Transport: t}).Do(req)
	if err != nil {
		return err
	}
	defer resp.Body.Close()
	if resp.StatusCode == http.StatusOK {
		return nil
	}
	b, err := io.ReadAll(io.LimitReader(resp.Body, maxSick))
	if err != nil {
		return fmt.Errorf("%s: %s: %w", url, resp.Status, err)
	}
	return fmt.Errorf("%s: %s: %s", url, resp.Status, plain(string(b)))
}
