package model

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"net"
	"net/http"
	"net/url"
	"os"
	"path"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"time"

	"golang.org/x/sync/errgroup"
)

// repo is a parsed hub reference.
type repo struct{ owner, name, rev string }

var (
	repoRef  = regexp.MustCompile(`^([A-Za-z0-9][A-Za-z0-9._-]{0,95})/([A-Za-z0-9][A-Za-z0-9._-]{0,95})$`)
	revision = regexp.MustCompile(`^[A-Za-z0-9][A-Za-z0-9._/-]{0,199}$`)
	commitID = regexp.MustCompile(`^[0-9a-f]{40}$`)
)

// parseRepo reads "hf:OWNER/NAME[@REVISION]". What it accepts is safe in a
// path and in a URL.
func parseRepo(ref string) (repo, error) {
	id, rev, given := strings.Cut(strings.TrimPrefix(ref, "hf:"), "@")
	if !given {
		rev = "main"
	}
	s := repoRef.FindStringSubmatch(id)
	if s == nil || strings.Contains(id, "..") || strings.Contains(id, "--") {
		return repo{}, fmt.Errorf("%.200s: a hub repository is written hf:OWNER/NAME or hf:OWNER/NAME@REVISION", ref)
	}
	if !revision.MatchString(rev) || strings.Contains(rev, "..") || path.Clean(rev) != rev {
		return repo{}, fmt.Errorf("%.200s: revision %.80q is not a branch, tag or commit name", ref, rev)
	}
	return repo{s[1], s[2], rev}, nil
}

// hub is a client for one repository at one endpoint.
type hub struct {
	repo
	opts     Options
	http     *http.Client
	endpoint *url.URL
	cache    hubCache
	token    string
	pause    func(attempt int) time.Duration // before attempt 1, 2, …
	stall    time.Duration                   // longest silence while reading
}

const (
	maxAPIBytes   = 32 << 20
	parallelFiles = 4
	maxAttempts   = 6 // without any progress
)

func newHub(r repo, opts Options) (*hub, error) {
	h := &hub{repo: r, opts: opts, token: opts.Getenv("HF_TOKEN"), stall: 30 * time.Second}
	h.pause = func(attempt int) time.Duration { return min(500*time.Millisecond<<(attempt-1), 8*time.Second) }
	raw := cmp.Or(strings.TrimRight(opts.Getenv("HF_ENDPOINT"), "/"), "https://huggingface.co")
	u, err := url.Parse(raw)
	if err != nil || (u.Scheme != "https" && u.Scheme != "http") || u.Host == "" {
		return nil, fmt.Errorf("HF_ENDPOINT %.200q is not an http(s) URL", raw)
	}
	h.endpoint = u
	if h.cache, err = newHubCache(r, opts.Getenv); err != nil {
		return nil, err
	}
	client := http.Client{Transport: &http.Transport{
		Proxy:                 http.ProxyFromEnvironment,
		DialContext:           (&net.Dialer{Timeout: 10 * time.Second}).DialContext,
		TLSHandshakeTimeout:   10 * time.Second,
		ResponseHeaderTimeout: 30 * time.Second,
		IdleConnTimeout:       30 * time.Second,
		MaxIdleConnsPerHost:   parallelFiles,
		ForceAttemptHTTP2:     true,
	}}
	if opts.HTTP != nil {
		client = *opts.HTTP
	}
	client.Timeout = 0 // bodies are long; get watches for silence
	h.http = &client
	return h, nil
}

// snapshot brings the repository into the hub's cache and returns its directory there.
func (r repo) snapshot(ctx context.Context, opts Options) (dir string, err error) {
	h, err := newHub(r, opts)
	if err != nil {
		return "", err
	}
	return h.snapshot(ctx)
}

// listing is the API's answer about a revision.
type listing struct {
	Commit string `json:"sha"`
	Files  []struct {
		Name string `json:"rfilename"`
	} `json:"siblings"`
}

// snapshot returns the directory of the revision's snapshot in the hub's cache. It
// downloads what is missing; if the hub cannot be reached, a complete snapshot will do.
func (h *hub) snapshot(ctx context.Context) (string, error) {
	defer h.http.CloseIdleConnections()
	cached, complete := h.cache.find(h.rev)
	offline := !slices.Contains([]string{"", "0"}, h.opts.Getenv("HF_HUB_OFFLINE"))
	if complete && (commitID.MatchString(h.rev) || offline) {
		return cached, nil
	}
	if offline {
		return "", fmt.Errorf("HF_HUB_OFFLINE is set and %s has no complete snapshot of revision %s", h.cache.dir, h.rev)
	}
	list, err := h.list(ctx, complete)
	var refused *statusError
	if err != nil && complete && ctx.Err() == nil && (!errors.As(err, &refused) || refused.retryable) {
		h.opts.Log.Warn("hub not reached: using the cached snapshot, which may not be the newest", "repository", h.owner+"/"+h.name, "snapshot", cached, "err", err)
		return cached, nil
	}
	if err != nil {
		return "", err
	}
	dir := h.cache.snapshot(list.Commit)
	if err := h.download(ctx, list); err != nil {
		return "", err
	}
	return dir, h.cache.setRef(h.rev, list.Commit)
}

// list asks the API for the revision's commit and files. once: there is a
// snapshot to fall back on, so try only once, and not for long.
func (h *hub) list(ctx context.Context, once bool) (listing, error) {
	if once {
		var cancel context.CancelFunc
		ctx, cancel = context.WithTimeout(ctx, 10*time.Second)
		defer cancel()
	}
	u := h.endpoint.JoinPath("api", "models", h.owner, h.name, "revision", url.PathEscape(h.rev))
	var list listing
	err := h.retry(ctx, once, func() (bool, error) {
		resp, err := h.get(ctx, http.MethodGet, u, 0)
		if err != nil {
			return false, err
		}
		defer resp.body.Close()
		list = listing{}
		b, err := io.ReadAll(io.LimitReader(resp.body, maxAPIBytes+1))
		if err != nil {
			return false, err
		}
		if len(b) > maxAPIBytes {
			return false, fatal{fmt.Errorf("answer is larger than %d bytes", maxAPIBytes)}
		}
		if err := json.Unmarshal(b, &list); err != nil {
			return false, fatal{fmt.Errorf("answer is not a repository listing: %w", err)}
		}
		return false, nil
	})
	if err != nil {
		return listing{}, fmt.Errorf("list %s: %w", u.Redacted(), err)
	}
	if !commitID.MatchString(list.Commit) {
		return listing{}, fmt.Errorf("list %s: commit %.60q is not a git commit", u.Redacted(), list.Commit)
	}
	return list, nil
}

// wantedFiles are downloaded when the repository has them.
var wantedFiles = []string{"config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json", "chat_template.jinja", indexName}

// download completes the snapshot: small files first, because the index says
// which weights belong to the model.
func (h *hub) download(ctx context.Context, list listing) error {
	var all, small []string
	for _, f := range list.Files {
		if all = append(all, f.Name); slices.Contains(wantedFiles, f.Name) {
			small = append(small, f.Name)
		}
	}
	if !slices.Contains(small, "config.json") {
		return errors.New("the repository has no config.json: it is not a transformers model")
	}
	if err := h.downloadAll(ctx, list.Commit, small); err != nil {
		return err
	}
	weights, _, err := weightFiles(all, func() ([]byte, error) {
		return os.ReadFile(filepath.Join(h.cache.snapshot(list.Commit), indexName))
	})
	switch {
	case err != nil:
		return err
	case len(weights) == 0:
		return errors.New("the repository has no .safetensors files: other weight formats are not supported" + ggufHint(all))
	case len(weights) > maxShards:
		return fmt.Errorf("the repository has %d .safetensors files", len(weights))
	}
	return h.downloadAll(ctx, list.Commit, weights)
}

func ggufHint(files []string) string {
	for _, f := range files {
		if strings.HasSuffix(f, ".gguf") {
			return fmt.Sprintf(" (it has GGUF files: download one, such as %.120q, and name it)", f)
		}
	}
	return ""
}

// downloadAll downloads the named files of a commit into its snapshot: first their sizes,
// for a true total, then the bytes.
func (h *hub) downloadAll(ctx context.Context, commit string, names []string) error {
	var jobs []*job
	for _, name := range names {
		if _, err := os.Stat(filepath.Join(h.cache.snapshot(commit), name)); err == nil {
			continue
		} else if !errors.Is(err, fs.ErrNotExist) {
			return err
		}
		jobs = append(jobs, &job{commit: commit, name: name})
	}
	if len(jobs) == 0 {
		return nil
	}
	each := func(fn func(context.Context, *job) error) error {
		g, ctx := errgroup.WithContext(ctx)
		g.SetLimit(parallelFiles)
		for _, j := range jobs {
			g.Go(func() error {
				if err := fn(ctx, j); err != nil {
					return fmt.Errorf("download %s: %w", j.name, err)
				}
				return nil
			})
		}
		return g.Wait()
	}
	if err := each(h.head); err != nil {
		return err
	}
	total := int64(0)
	for _, j := range jobs {
		total += j.size
	}
	meter := newMeter(h.opts.Progress, "download", h.owner+"/"+h.name, total)
	if err := each(func(ctx context.Context, j *job) error { return h.bring(ctx, j, meter) }); err != nil {
		return err
	}
	meter.finish()
	return nil
}
