package main

import (
	"fmt"
	"log"
	"os"
	"path/filepath"
	"strings"
)

// chartFrom is the Helm chart. Its Chart.yaml has placeholders for the versions.
const chartFrom = "deploy/helm/xpyd"

// chart packs the Helm chart as `helm package` does, with the release's version as its own and the program's.
func (r *release) chart() error {
	log.Print("chart")
	tree := filepath.Join(r.work, "chart")
	if err := os.CopyFS(tree, os.DirFS(chartFrom)); err != nil {
		return err
	}
	about := filepath.Join(tree, "Chart.yaml")
	text, err := os.ReadFile(about)
	if err != nil {
		return err
	}
	stamped, err := stampChart(string(text), r.version)
	if err != nil {
		return err
	}
	if err := os.WriteFile(about, []byte(stamped), 0o644); err != nil {
		return err
	}
	return archive(filepath.Join(r.out, "xpyd-"+strings.TrimPrefix(r.version, "v")+".tgz"), tree, "xpyd", r.at)
}

// stampChart puts a release's version, such as v1.2.3, in place of Chart.yaml's placeholders. The image's tag is
// the version with its v.
func stampChart(text, version string) (string, error) {
	for from, to := range map[string]string{
		"version: 0.0.0\n":         "version: " + strings.TrimPrefix(version, "v") + "\n",
		"appVersion: \"latest\"\n": "appVersion: \"" + version + "\"\n",
	} {
		if strings.Count(text, "\n"+from) != 1 {
			return "", fmt.Errorf("Chart.yaml: want one line %q", from)
		}
		text = strings.Replace(text, "\n"+from, "\n"+to, 1)
	}
	return text, nil
}
