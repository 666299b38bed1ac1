package docs

import (
	"encoding/json"
	"maps"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"

	"go.yaml.in/yaml/v3"
)

// metric is a metric's name in PromQL, or in the reference; a histogram's parts are its own.
var metric = regexp.MustCompile(`\b(?:xpyd_|vllm:)[a-z0-9_]+`)

// metrics are those of docs/reference/metrics.md, with histograms' series.
func metrics(t *testing.T) map[string]bool {
	t.Helper()
	out := map[string]bool{}
	for line := range strings.Lines(slurp(t, "docs/reference/metrics.md")) {
		cells := strings.Split(line, "|")
		if len(cells) < 4 {
			continue
		}
		name := strings.Trim(cells[1], " `")
		out[name] = true
		if strings.TrimSpace(cells[2]) == "histogram" {
			for _, part := range []string{"_bucket", "_sum", "_count"} {
				out[name+part] = true
			}
		}
	}
	if len(out) < 100 {
		t.Fatalf("%d metrics", len(out))
	}
	return out
}

func slurp(t *testing.T, path string) string {
	t.Helper()
	b, err := os.ReadFile(filepath.Join(root, path))
	if err != nil {
		t.Fatal(err)
	}
	return string(b)
}

func known(t *testing.T, where, expr string, all map[string]bool) {
	t.Helper()
	names := metric.FindAllString(expr, -1)
	if len(names) == 0 && !strings.Contains(expr, "up{") && !strings.Contains(expr, "process_") {
		t.Errorf("%s: %q asks for no metric of ours", where, expr)
	}
	for _, name := range names {
		if !all[name] {
			t.Errorf("%s: %s is not in docs/reference/metrics.md", where, name)
		}
	}
}

// TestAlerts: each alert asks for metrics that there are, has a summary, and a runbook that says what it means, where to look and
// what to do; no runbook is of an alert that is gone; and the committed log says that each was fired by its fault.
func TestAlerts(t *testing.T) {
	var file struct {
		Groups []struct {
			Rules []struct {
				Alert, Expr         string
				Labels, Annotations map[string]string
			}
		}
	}
	if err := yaml.Unmarshal([]byte(slurp(t, "configs/compose/alerts.yml")), &file); err != nil {
		t.Fatal(err)
	}
	book := map[string]string{}
	for _, section := range strings.Split(slurp(t, "docs/runbooks.md"), "\n## ")[1:] {
		name, text, _ := strings.Cut(section, "\n")
		book[name] = text
	}
	logs, err := filepath.Glob(filepath.Join(root, "bench/raw/*-alerts.log"))
	if err != nil || len(logs) == 0 {
		t.Fatalf("no log of alerts, %v", err)
	}
	fired, err := os.ReadFile(slices.Max(logs))
	if err != nil {
		t.Fatal(err)
	}
	all := metrics(t)
	for _, g := range file.Groups {
		for _, r := range g.Rules {
			known(t, r.Alert, r.Expr, all)
			if want := "docs/runbooks.md#" + strings.ToLower(r.Alert); !strings.HasSuffix(r.Annotations["runbook_url"], want) || r.Annotations["summary"] == "" || r.Labels["severity"] == "" {
				t.Errorf("%s: %v, %v", r.Alert, r.Labels, r.Annotations)
			}
			for _, part := range []string{"**Means**: ", "**Look at**: ", "**Do**: "} {
				if !strings.Contains(book[r.Alert], part) {
					t.Errorf("%s: its runbook lacks %q", r.Alert, part)
				}
			}
			if !strings.Contains(string(fired), r.Alert+" fired ") {
				t.Errorf("%s was never fired by its fault: scripts/alerts-test", r.Alert)
			}
			delete(book, r.Alert)
		}
	}
	if len(book) > 0 {
		t.Errorf("runbooks of no alert: %v", slices.Collect(maps.Keys(book)))
	}
}

// TestGrafana: each panel asks for metrics that there are, and says what it shows; what varies is used; and no two panels overlap.
func TestGrafana(t *testing.T) {
	all := metrics(t)
	files, err := filepath.Glob(filepath.Join(root, "configs/compose/grafana/dashboards/*.json"))
	if err != nil || len(files) < 2 {
		t.Fatalf("%v, %v", files, err)
	}
	uids := map[string]bool{}
	for _, path := range files {
		type box struct{ X, Y, W, H int }
		var d struct {
			UID, Title string
			Templating struct {
				List []struct{ Name, Definition string }
			}
			Panels []struct {
				Type, Title, Description string
				GridPos                  box
				Targets                  []struct{ Expr string }
			}
		}
		text := slurp(t, strings.TrimPrefix(path, root+"/"))
		if err := json.Unmarshal([]byte(text), &d); err != nil {
			t.Fatalf("%s: %v", path, err)
		}
		if d.UID == "" || uids[d.UID] || len(d.Panels) < 10 {
			t.Errorf("%s: uid %q, %d panels", path, d.UID, len(d.Panels))
		}
		uids[d.UID] = true
		for _, v := range d.Templating.List {
			if known(t, v.Name, v.Definition, all); strings.Count(text, "$"+v.Name) < 2 {
				t.Errorf("%s: nothing varies with %s", path, v.Name)
			}
		}
		var placed []box
		for _, p := range d.Panels {
			for _, target := range p.Targets {
				known(t, d.Title+", "+p.Title, target.Expr, all)
			}
			if p.Type != "row" && (p.Description == "" || len(p.Targets) == 0) {
				t.Errorf("%s, %s: no description, or no target", d.Title, p.Title)
			}
			for _, o := range placed {
				if p.GridPos.X < o.X+o.W && o.X < p.GridPos.X+p.GridPos.W && p.GridPos.Y < o.Y+o.H && o.Y < p.GridPos.Y+p.GridPos.H {
					t.Errorf("%s, %s overlaps another", d.Title, p.Title)
				}
			}
			placed = append(placed, p.GridPos)
		}
	}
}
