"""What a model card cites."""

import textwrap

COPE = {
    "title": "Co-Evolving Acting and Forecasting for Language Agents",
    "id": "2610.20597",
    # docstyle-ignore
    "citation": textwrap.dedent("""\
        @article{yu2026cope,
            title        = {{Co-Evolving Acting and Forecasting for Language Agents}},
            author       = {Haofei Yu and Yixing Chen and Yining Zhao and Xuyan Ye and Yuxiang Liu
                            and Zhigang Hua and Yan Xie and Shuang Yang and Jiaxuan You},
            year         = 2026,
            eprint       = {arXiv:2610.20597},
        }"""),
}
