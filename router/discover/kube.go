package discover

import (
	"context"
	"crypto/tls"
	"crypto/x509"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/http"
	"net/url"
	"os"
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/xpyd/xpyd/internal/config"
	"github.com/xpyd/xpyd/internal/fleet"
)

// Kubernetes names services whose pods are engines.
type Kubernetes struct {
	// API is the API server's URL; "" is the cluster that the router runs in.
	API string `key:"api"`
	// Credentials is the folder with token, ca.crt and namespace.
	Credentials string `key:"credentials"`
	// Namespace is where the services are; "" is the router's own.
	Namespace string    `key:"namespace"`
	Services  []Service `key:"services"`
}

// Service is one of them.
type Service struct {
	Name    string     `key:"name"`
	Role    fleet.Role `key:"role"` // prefill or decode
	Dialect string     `key:"dialect"`
	Port    string     `key:"port"`  // name or number in the slice; "" is its first
	Model   string     `key:"model"` // the name clients use; "" asks the engine
	// BootstrapPort is where decode finds a prefill engine of this service.
	BootstrapPort int `key:"bootstrap_port"`
	KVEventsPort  int `key:"kv_events_port"`
	KVReplayPort  int `key:"kv_replay_port"`
}

// validate returns an error with a key of the section above.
func (k Kubernetes) validate() error {
	if k.API != "" {
		if u, err := url.Parse(k.API); err != nil || u.Scheme != "https" && u.Scheme != "http" || u.Host == "" || u.User != nil {
			return config.Bad("kubernetes.api", "%q is not https://host:port", k.API)
		}
	}
	for n, s := range k.Services {
		switch {
		case s.Name == "":
			return config.Bad("kubernetes.services", "entry %d: name is required", n+1)
		case s.Role != fleet.Prefill && s.Role != fleet.Decode:
			return config.Bad("kubernetes.services", "entry %d: role %q is neither prefill nor decode", n+1, s.Role)
		case s.Dialect == "":
			return config.Bad("kubernetes.services", "entry %d: dialect is required", n+1)
		}
		for _, p := range []int{s.BootstrapPort, s.KVEventsPort, s.KVReplayPort} {
			if p < 0 || p > 65535 {
				return config.Bad("kubernetes.services", "entry %d: port %d is not in 0..65535", n+1, p)
			}
		}
	}
	return nil
}

const (
	serviceAccount = "/var/run/secrets/kubernetes.io/serviceaccount"
	fromKube       = "kube"
	listLimit      = 64 << 20
	watchTime      = 4 * time.Minute // after which the server ends a watch
	kubeFirstWait  = 200 * time.Millisecond
	kubeLastWait   = 10 * time.Second
)

// Kube follows the EndpointSlices of services: a list, then a watch from there on, and a new list
// when the watch cannot go on (410 Gone).
type Kube struct {
	cfg    Kubernetes
	fleet  Fleet
	log    *slog.Logger
	base   string
	http   *http.Client // of the API server
	ask    *http.Client // of engines
	no     refusals
	cancel context.CancelFunc
	wg     sync.WaitGroup
}

// FollowKube starts to follow. The caller closes it.
func FollowKube(cfg Kubernetes, f Fleet, log *slog.Logger) (*Kube, error) {
	if cfg.Credentials == "" {
		cfg.Credentials = serviceAccount
	}
	k := &Kube{cfg: cfg, fleet: f, log: log, base: strings.TrimSuffix(cfg.API, "/"), ask: NewClient(), no: refusals{while: 10 * time.Minute}}
	if k.base == "" {
		host, port := os.Getenv("KUBERNETES_SERVICE_HOST"), os.Getenv("KUBERNETES_SERVICE_PORT")
		if host == "" || port == "" {
			return nil, config.Bad("kubernetes.api", "it is required outside a cluster")
		}
		k.base = "https://" + net.JoinHostPort(host, port)
	}
	if k.cfg.Namespace == "" {
		b, err := os.ReadFile(cfg.Credentials + "/namespace")
		if err != nil {
			return nil, config.Bad("kubernetes.namespace", "%v", err)
		}
		k.cfg.Namespace = strings.TrimSpace(string(b))
	}
	tr := &http.Transport{TLSHandshakeTimeout: 5 * time.Second, ResponseHeaderTimeout: 10 * time.Second,
		DialContext: (&net.Dialer{Timeout: 5 * time.Second, KeepAlive: 15 * time.Second}).DialContext, ForceAttemptHTTP2: true}
	if strings.HasPrefix(k.base, "https:") {
		pem, err := os.ReadFile(cfg.Credentials + "/ca.crt")
		if err != nil {
			return nil, config.Bad("kubernetes.credentials", "%v", err)
		}
		pool := x509.NewCertPool()
		if !pool.AppendCertsFromPEM(pem) {
			return nil, config.Bad("kubernetes.credentials", "there is no certificate in ca.crt")
		}
		tr.TLSClientConfig = &tls.Config{RootCAs: pool, MinVersion: tls.VersionTLS12}
	}
	k.http = &http.Client{Transport: tr}
	ctx, cancel := context.WithCancel(context.Background())
	k.cancel = cancel
	for _, s := range cfg.Services {
		f := &follower{k: k, s: s, slices: map[string]*slice{}, pods: map[string]*pod{}}
		k.wg.Go(func() { f.followLoop(ctx) })
	}
	return k, nil
}

// Close stops following, and waits. Members stay as they are.
func (k *Kube) Close() error {
	k.cancel()
	k.wg.Wait()
	k.http.CloseIdleConnections()
	k.ask.CloseIdleConnections()
	return nil
}

// Refusals are the pods that were found lately and not added.
func (k *Kube) Refusals() []Refusal { return k.no.all(time.Now()) }

// slice is an EndpointSlice, as far as it is needed.
type slice struct {
	Metadata struct {
		Name    string `json:"name"`
		Version string `json:"resourceVersion"`
	} `json:"metadata"`
	Endpoints []struct {
		Addresses  []string `json:"addresses"`
		Conditions struct {
			Ready       *bool `json:"ready"`
			Serving     *bool `json:"serving"`
			Terminating *bool `json:"terminating"`
		} `json:"conditions"`
		Zone   string `json:"zone"`
		Node   string `json:"nodeName"`
		Target *struct {
			Name string `json:"name"`
			UID  string `json:"uid"`
		} `json:"targetRef"`
	} `json:"endpoints"`
	Ports []struct {
		Name string `json:"name"`
		Port int    `json:"port"`
	} `json:"ports"`
}

var errGone = errors.New("the watch cannot be continued")

// follower is one service.
type follower struct {
	k      *Kube
	s      Service
	slices map[string]*slice
	pods   map[string]*pod // by id
}

// pod is a pod's member of the fleet, or what may become one.
type pod struct {
	uid   string // and where it is
	epoch uint64
	inst  fleet.Instance
	next  time.Time // when it may be examined again
	added bool
}

// followLoop lists and watches until ctx ends.
func (f *follower) followLoop(ctx context.Context) {
	wait := kubeFirstWait
	timer := time.NewTimer(0)
	defer timer.Stop()
	<-timer.C
	version := ""
	for ctx.Err() == nil {
		began := time.Now()
		var err error
		if version == "" {
			version, err = f.list(ctx)
		}
		if err == nil {
			version, err = f.watch(ctx, version)
		}
		switch {
		case ctx.Err() != nil:
			return
		case errors.Is(err, errGone):
			version = ""
		case errors.Is(err, errEnded):
			wait = kubeFirstWait
		case err != nil:
			f.k.log.Warn("kubernetes", "service", f.s.Name, "err", err.Error(), "again_in", wait)
		}
		if time.Since(began) > kubeLastWait {
			wait = kubeFirstWait
		}
		timer.Reset(wait)
		select {
		case <-timer.C:
		case <-ctx.Done():
			return
		}
		wait = min(2*wait, kubeLastWait)
	}
}

// get asks the API server. The token is read each time: it is renewed.
func (f *follower) get(ctx context.Context, query url.Values) (*http.Response, error) {
	query.Set("labelSelector", "kubernetes.io/service-name="+f.s.Name)
	u := f.k.base + "/apis/discovery.k8s.io/v1/namespaces/" + url.PathEscape(f.k.cfg.Namespace) + "/endpointslices?" + query.Encode()
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, u, nil)
	if err != nil {
		return nil, err
	}
	req.Header.Set("Accept", "application/json")
	if token, err := os.ReadFile(f.k.cfg.Credentials + "/token"); err == nil {
		req.Header.Set("Authorization", "Bearer "+strings.TrimSpace(string(token)))
	}
	resp, err := f.k.http.Do(req)
	if err != nil {
		return nil, err
	}
	switch resp.StatusCode {
	case http.StatusOK:
		return resp, nil
	case http.StatusGone:
		err = errGone
	default:
		text, _ := io.ReadAll(io.LimitReader(resp.Body, 512)) // only for the message
		err = fmt.Errorf("status %d: %s", resp.StatusCode, text)
	}
	resp.Body.Close()
	return nil, err
}

// list reads the present state, page by page. What it lacks is gone.
func (f *follower) list(ctx context.Context) (version string, err error) {
	ctx, cancel := context.WithTimeout(ctx, time.Minute)
	defer cancel()
	found := map[string]*slice{}
	query := url.Values{"limit": {"500"}}
	for {
		resp, err := f.get(ctx, query)
		if err != nil {
			return "", err
		}
		var page struct {
			Metadata struct {
				Version  string `json:"resourceVersion"`
				Continue string `json:"continue"`
			} `json:"metadata"`
			Items []*slice `json:"items"`
		}
		err = json.NewDecoder(io.LimitReader(resp.Body, listLimit)).Decode(&page)
		resp.Body.Close()
		if err != nil {
			return "", err
		}
		for _, s := range page.Items {
			if s != nil {
				found[s.Metadata.Name] = s
			}
		}
		if page.Metadata.Continue == "" {
			f.slices = found
			f.sync(ctx)
			return page.Metadata.Version, nil
		}
		query.Set("continue", page.Metadata.Continue)
	}
}

// watch follows changes from a version on, and returns the version that it came to.
func (f *follower) watch(ctx context.Context, version string) (string, error) {
	ctx, cancel := context.WithTimeout(ctx, watchTime+30*time.Second)
	defer cancel()
	resp, err := f.get(ctx, url.Values{"watch": {"1"}, "allowWatchBookmarks": {"true"}, "resourceVersion": {version},
		"timeoutSeconds": {strconv.Itoa(int(watchTime.Seconds()))}})
	if err != nil {
		return version, err
	}
	defer resp.Body.Close()
	changes := make(chan change)
	done := make(chan struct{})
	go func() {
		defer close(done)
		readChanges(ctx, resp.Body, changes)
	}()
	defer func() { cancel(); <-done }()
	again := time.NewTicker(examineAgain)
	defer again.Stop()
	for {
		select {
		case <-ctx.Done():
			return version, ctx.Err()
		case <-again.C: // for engines that were not up yet
			f.sync(ctx)
		case c := <-changes:
			switch {
			case c.err != nil:
				return version, c.err
			case c.Object.Metadata.Version == "":
				return version, fmt.Errorf("an event %q without a version", c.Type)
			}
			version = c.Object.Metadata.Version
			switch c.Type {
			case "ADDED", "MODIFIED":
				f.slices[c.Object.Metadata.Name] = &c.Object
			case "DELETED":
				delete(f.slices, c.Object.Metadata.Name)
			default: // BOOKMARK
				continue
			}
			f.sync(ctx)
		}
	}
}

// change is one event of a watch, or its end.
type change struct {
	Type   string `json:"type"`
	Object slice  `json:"object"`
	err    error
}

// readChanges hands events over until the stream or ctx ends.
func readChanges(ctx context.Context, body io.Reader, out chan<- change) {
	dec := json.NewDecoder(body)
	for {
		var c change
		var raw struct {
			Type   string          `json:"type"`
			Object json.RawMessage `json:"object"`
		}
		err := dec.Decode(&raw)
		if err == nil && raw.Type == "ERROR" {
			var status struct {
				Code    int    `json:"code"`
				Message string `json:"message"`
			}
			if err = json.Unmarshal(raw.Object, &status); err == nil {
				err = fmt.Errorf("the watch ended: %d %s", status.Code, status.Message)
				if status.Code == http.StatusGone {
					err = errGone
				}
			}
		} else if err == nil {
			c.Type = raw.Type
			err = json.Unmarshal(raw.Object, &c.Object)
		}
		if c.err = err; errors.Is(err, io.EOF) {
			c.err = errEnded
		}
		select {
		case out <- c:
		case <-ctx.Done():
			return
		}
		if c.err != nil {
			return
		}
	}
}

// errEnded: the server ended the watch, as it does now and then.
var errEnded = errors.New("the server ended the watch")
